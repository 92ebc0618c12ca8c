"""launch/submit.py: the batch script that it writes, and the runs that it refuses before they are queued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.submit import main, seconds

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "launch" / "slurm.sbatch"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "a run.yaml"
    path.write_text(
        "student: {hf: s}\nteachers: [{hf: t}]\ndata: {data_path: text.jsonl}\noptimizer: {lr: 1e-3}\n"
        "training: {train_iters: 10, seq_length: 32, global_batch_size: 8, micro_batch_size: 1}\n"
        "parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}\n"
        "checkpoint: {save: runs/a, load: runs/a}\nlog: {name: first}\n"
    )
    return str(path)


def script(capsys, *argv: str) -> str:
    assert main([*argv, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_script_is_the_template_with_the_options_and_the_run(config, capsys):
    options = (
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--partition",
        "gpu",
        "--account",
        "us",
        "--time",
        "1-0",
    )
    more = (
        "--signal-lead-s",
        "300",
        "--option",
        "qos=high",
        "--option",
        "overcommit",
        "--option",
        "exclusive=user",
    )
    written = script(capsys, *options, *more, "--config", config, "--lr", "2e-3").splitlines()
    template = TEMPLATE.read_text().splitlines()
    assert [line for line in template if line not in written] == [
        "#SBATCH --job-name=mkd",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
        "#SBATCH --signal=B:USR1@120",
    ]
    assert [line for line in written if line not in template] == [
        "#SBATCH --job-name=first",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --exclusive=user",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --nodes=2",
        "#SBATCH --time=1-0",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=us",
        "#SBATCH --qos=high",
        "#SBATCH --overcommit",
        f"set -- --config '{config}' --lr 2e-3",
    ]
    first_command = next(index for index, line in enumerate(written) if line and not line.startswith("#"))
    # Slurm would not read them
    assert not [line for line in written[first_command:] if line.startswith("#SBATCH")]


def test_the_script_is_bash_and_has_the_run_as_its_arguments(config, capsys):
    written = script(capsys, "--config", config, "--log-dir", "it's $HOME; `ls`")
    assert subprocess.run(["bash", "-n"], input=written, text=True, capture_output=True).stderr == ""
    arguments = written.partition("set -euo pipefail")[0] + 'printf "%s\\n" "$@"\n'
    printed = subprocess.run(["bash"], input=arguments, text=True, capture_output=True, check=True).stdout
    assert printed.splitlines() == ["--config", config, "--log-dir", "it's $HOME; `ls`"]


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (
            ["--gpus-per-node", "6"],
            ["6 processes cannot be divided into replicas of 4", "start a multiple of 4 processes"],
        ),
        (
            ["--nodes", "5"],
            ["global-batch-size 8 is not divisible by micro-batch-size 1 x data-parallel 10 = 10"],
        ),
        (["--option", ""], ["--option '' is no option of sbatch", "write NAME=VALUE"]),
        (["--option", "comment="], ["--option 'comment=' is no option of sbatch"]),
        (["--option=--qos=high"], ["--option '--qos=high' is no option of sbatch"]),
        (
            ["--option", "comment=a\nb"],
            ["--comment 'a\\nb' is empty or has a line break", "a value of one line"],
        ),
        (["--name", "a\nb"], ["--job-name 'a\\nb' is empty or has a line break"]),
        (["--partition", ""], ["--partition '' is empty"]),
        (["--option", "time=99"], ["--option time=99 would replace", "give --time instead"]),
        (
            ["--option", "signal=B:USR2@5"],
            ["--option signal=B:USR2@5 would replace", "give --signal-lead-s instead"],
        ),
        (["--option", "ntasks-per-node=8"], ["give --gpus-per-node instead"]),
        (["--save", "runs/b"], ["--save is runs/b and --load runs/a", "would start from the beginning"]),
        (["--ckpt-step", "100"], ["--ckpt-step 100", "never end"]),
        (["--no-exit-signal-handler"], ["--no-exit-signal-handler", "would kill the run"]),
        (["--time", "3"], ["--time 3 leaves no time to train", "a shorter --signal-lead-s"]),
        (["--time", "soon"], ["--time soon is not a time", "write minutes (90)"]),
        (["--nodes", "0"], ["'0' is not a whole number of 1 or more"]),
        (["--gpus-per-node", "all"], ["'all' is not a whole number of 0 or more"]),
        (["--lrr", "1"], ["--lrr"]),
    ],
)
def test_refusals(argv, texts, config, capsys):
    assert main(["--config", config, *argv]) == 64
    printed = capsys.readouterr()
    assert (
        printed.out == "" and printed.err.startswith("error") and all(text in printed.err for text in texts)
    ), printed.err


VALUES = {
    "us:4,eu": "us:4,eu",
    "my run": '"my run"',
    "it's": '"it\'s"',
    'a\\b "c" $d `e`': '"a\\\\b \\"c\\" $d `e`"',
    "a#b": '"a#b"',
}


@pytest.mark.parametrize(("value", "written"), VALUES.items())
def test_values_are_quoted_as_sbatch_reads_them(value, written, config, capsys):
    """The real sbatch reads this in tests/test_slurm.py."""
    printed = script(capsys, "--config", config, "--name", value, "--option", f"comment={value}").splitlines()
    assert f"#SBATCH --job-name={written}" in printed and f"#SBATCH --comment={written}" in printed


@pytest.mark.parametrize("load", ["runs/a/", "./runs/../runs/a", str(ROOT / "runs" / "a")])
def test_one_folder_has_many_names(load, config, capsys):
    assert "#SBATCH" in script(capsys, "--config", config, "--load", load)


def test_all_problems_at_once(config, capsys):
    assert main(["--config", config, "--gpus-per-node", "3", "--time", "1", "--save", "runs/b"]) == 64
    assert capsys.readouterr().err.startswith("error: 3 problems:\n")


def test_processes_of_a_cpu_run_are_nproc(config, capsys, monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    assert main(["--config", config, "--gpus-per-node", "0"]) == 64
    assert "3 processes cannot be divided" in capsys.readouterr().err
    monkeypatch.setenv("NPROC", "4")
    assert "#SBATCH --gpus-per-node=0\n" in script(capsys, "--config", config, "--gpus-per-node", "0")


TIMES = {
    "90": 5400,
    "1:30": 90,
    "2:00:05": 7205,
    "1-0": 86400,
    "2-12:30": 217800,
    "1-0:0:1": 86401,
    "1h": None,
    "": None,
}


@pytest.mark.parametrize(("time", "expected"), TIMES.items())
def test_times_are_read_as_slurm_reads_them(time, expected):
    assert seconds(time) == expected


def test_without_slurm_and_without_torch(config, tmp_path):
    """Run it as a program without sbatch; nothing heavy is imported."""
    call = f"main(['--config', {config!r}])"
    code = f"import sys; from launch.submit import main; print({call}, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert ended.stdout == "1 False\n" and ended.stderr.startswith("error[sbatch-missing]: ")


def test_no_time_limit_is_one_too(config, capsys):
    """Slurm's 0 means that the job is never told to end."""
    assert "#SBATCH --time=0\n" in script(capsys, "--config", config, "--time", "0")


APART = ("--teacher-processes", "8", "--nodes", "1", "--gpus-per-node", "4")


def test_machines_of_teachers_are_the_second_part_of_the_job(config, capsys):
    own = ("--teacher-nodes", "2", "--teacher-constraint", "a100", "--partition", "gpu")
    lines = script(capsys, *APART, *own, "--config", config).splitlines()
    first, second = lines[: lines.index("#SBATCH hetjob")], lines[lines.index("#SBATCH hetjob") :]
    assert "#SBATCH --nodes=1" in first and not any("constraint" in line for line in first)
    written = [line for line in second if line.startswith("#SBATCH --")]
    assert written == [
        "#SBATCH --exclusive",
        "#SBATCH --nodes=2",
        "#SBATCH --constraint=a100",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
    ]
    assert not any(
        "hetjob" in line for line in script(capsys, "--gpus-per-node", "4", "--config", config).splitlines()
    )


@pytest.mark.parametrize(
    "argv, text",
    [
        ((*APART, "--teacher-nodes", "1"), "--teacher-nodes 1 has 4 processes, --teacher-processes 8"),
        (("--nodes", "1", "--gpus-per-node", "4", "--teacher-nodes", "1"), "--teacher-processes 0"),
        (("--gpus-per-node", "4", "--teacher-constraint", "a100"), "--teacher-constraint without"),
        (("--gpus-per-node", "4", "--teacher-processes", "4"), "of teachers of 4 processes"),
        ((*APART, "--teacher-processes", "auto", "--teacher-nodes", "1"), "auto with --teacher-nodes"),
    ],
)
def test_machines_that_do_not_fit_the_sides(config, capsys, argv, text):
    assert main([*argv, "--dry-run", "--config", config]) == 64
    assert text in capsys.readouterr().err


def test_the_split_of_a_job_may_be_open(config, capsys):
    """Its processes choose it."""
    lines = script(capsys, *APART, "--teacher-processes", "auto", "--config", config)
    assert "--teacher-processes auto" in lines


def test_ranks_follow_the_machines_of_a_job_of_two_parts():
    """The command that each machine runs numbers it: the first part's machines come first."""
    template = TEMPLATE.read_text()
    (command,) = [line for line in template.splitlines() if "PET_NODE_RANK" in line]
    command = command.split("'")[1]
    numbers = [
        subprocess.run(
            ["bash", "-c", command, "numbered", "printenv", "PET_NODE_RANK"],
            env={"PATH": "/usr/bin:/bin", "MACHINES": "n1\nn10\nt1", "SLURMD_NODENAME": name},
            capture_output=True,
            text=True,
        ).stdout.strip()
        for name in ("n1", "n10", "t1")
    ]
    assert numbers == ["0", "1", "2"]
