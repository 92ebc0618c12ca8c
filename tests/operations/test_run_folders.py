"""The folders of --save and --load that a run may start with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mkd.checkpoint.folders import POINTER
from mkd.config.schema import CheckpointConfig, Config, LogConfig
from mkd.operations.run_folders import (
    cache_folder,
    changes_to_resume,
    describe_saves,
    log_folder,
    requeue_problems,
    restart_notes,
    save_notes,
    start_problems,
    with_save_folder,
    write_job,
)
from tests.reported import reports
from tests.train.command import flags, make_files, read_metrics, run_main


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Make two folders with a checkpoint, `a` and `b`, one with a damaged checkpoint, and an empty one."""
    for name in ("a", "b"):
        (tmp_path / name / "iter_0000002").mkdir(parents=True)
        (tmp_path / name / "iter_0000002" / "metadata.json").touch()
        (tmp_path / name / POINTER).write_text("2\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / POINTER).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (None, None),
        ("empty", None),
        ("new", None),
        (None, "a"),
        ("new", "a"),
        ("a", "a"),
        ("a", "./a/"),
        ("link", "a"),
        ("a", "a/iter_0000002"),
        ("new", "a/iter_0000002"),
        ("new", "damaged"),
        ("empty", "empty"),
        ("new", "new"),  # the first start of a job that will be restarted
    ],
)
def test_what_may_begin(save, load, folders):
    assert list(start_problems(CheckpointConfig(save=save, load=load))) == []


@pytest.mark.parametrize(
    ("save", "load", "found"),
    [
        ("a", None, ["--save a holds the checkpoints of a run"]),
        ("a/iter_0000002", None, ["--save a/iter_0000002 holds the checkpoints of a run"]),
        ("damaged", None, ["--save damaged holds the checkpoints of a run"]),
        ("a", "b", ["--save a holds the checkpoints of a run"]),
        ("a", "typo", ["--load typo holds no checkpoint", "--save a holds the checkpoints of a run"]),
        ("new", "empty", ["--load empty holds no checkpoint"]),
        (None, "empty", ["--load empty holds no checkpoint"]),
        ("a", "a/iter_0000009", ["--load a/iter_0000009 holds no checkpoint"]),
    ],
)
def test_what_is_refused(save, load, found, folders):
    problems = list(start_problems(CheckpointConfig(save=save, load=load)))
    assert len(problems) == len(found)
    assert all(problem.what.startswith(text) for problem, text in zip(problems, found, strict=True))
    assert all(problem.exit_code == 64 and problem.why and problem.do for problem in problems)
    assert f"resume that run (--load {save})" in problems[-1].do or problems[-1].what.startswith("--load")


@pytest.mark.parametrize(
    ("given", "save"),
    [
        ({}, "runs/kd"),
        ({"name": "qwen"}, "runs/qwen-3"),  # runs/qwen and runs/qwen-2 hold checkpoints
        ({"log_dir": "a"}, "a-2"),
        ({"log_dir": "new"}, "new"),
        ({"log_dir": "a", "load": "a"}, "a"),  # resumes
        ({"name": "qwen", "load": "runs/qwen"}, "runs/qwen"),
        ({"name": "qwen", "load": "runs/qwen-2/iter_0000002"}, "runs/qwen-2"),
        ({"name": "qwen", "load": "runs/qwen-4"}, "runs/qwen-4"),  # the first start of a job
        ({"name": "qwen", "load": "a"}, "runs/qwen-3"),  # starts from another run, which stays as it is
        ({"log_dir": "b", "load": "a"}, "b-2"),
        ({"save": "b"}, "b"),
        ({"no_save": True}, None),
    ],
)
def test_where_a_run_without_save_saves(given, save, folders):
    for number in ("", "-2"):
        shutil.copytree("a", f"runs/qwen{number}")
    log = LogConfig(**{name: given[name] for name in ("log_dir", "name") if name in given})
    checkpoint = CheckpointConfig(**{name: value for name, value in given.items() if not hasattr(log, name)})
    config = with_save_folder(Config(checkpoint=checkpoint, log=log))
    assert config.checkpoint.save == save and config.checkpoint.load == given.get("load")
    assert str(log_folder(config)) == given.get("log_dir", save or "runs/kd")
    assert str(cache_folder(config)).removesuffix("/data_cache") in ("a", "b", "new", "runs/kd", "runs/qwen")
    saves = describe_saves(config)
    assert saves.startswith(f"saves to {save} after 15 minutes" if save else "saves no checkpoints")
    assert bool(save_notes(config)) == (save in ("runs/qwen-3", "a-2") and "load" not in given)


def test_how_to_resume_from_the_last_step(folders):
    """The command of a run that kept no step of its own in --save starts as before."""
    for load, step, changes in (
        ("link", None, []),
        ("link", 2, ["without --ckpt-step"]),
        ("a/iter_0000002", None, ["with --load a"]),
        ("b", 2, ["without --ckpt-step", "with --load a"]),
        (None, None, ["with --load a"]),
    ):
        checkpoint = CheckpointConfig(save="a", load=load, ckpt_step=step)
        assert changes_to_resume(checkpoint, Path("a/iter_0000004")) == changes
        assert changes_to_resume(checkpoint, Path("b/iter_0000002")) == []
        assert changes_to_resume(checkpoint, None) == []


def test_a_run_that_saves_nothing_leaves_the_metrics_of_one_that_does(folders):
    shutil.copytree("a", "runs/qwen")
    nothing = CheckpointConfig(no_save=True)
    for log, folder in ((LogConfig(name="qwen"), "runs/qwen-2"), (LogConfig(log_dir="a"), "a")):
        assert str(log_folder(with_save_folder(Config(checkpoint=nothing, log=log)))) == folder


def test_restarts_by_torchrun_need_load():
    environment = {"TORCHELASTIC_MAX_RESTARTS": "2"}
    (note,) = restart_notes(CheckpointConfig(save="a"), environment)
    assert "--max-restarts 2" in note and "--load a" in note
    assert restart_notes(CheckpointConfig(save="a", load="a"), environment) == []
    assert restart_notes(CheckpointConfig(save="a"), {"TORCHELASTIC_MAX_RESTARTS": "0"}) == []
    several = environment | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": "8",
        "WORLD_SIZE": "16",
    }
    (note,) = restart_notes(CheckpointConfig(save="a", load="a"), several)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note
    assert restart_notes(CheckpointConfig(save="a", load="a"), several | {"WORLD_SIZE": "8"}) == []


def test_a_run_that_saves_nothing_hears_of_restarts(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    config = Config(checkpoint=CheckpointConfig(no_save=True))
    (note,) = save_notes(config)
    assert describe_saves(config) == "saves no checkpoints"
    assert note.endswith("leave out --no-save and give --load")


def test_a_job_that_slurm_starts_again_needs_load(folders):
    """Otherwise it would train from the same step at every start, into one folder after the other."""

    def codes(restarts, job="7", **given):
        config = with_save_folder(Config(checkpoint=CheckpointConfig(**given), log=LogConfig(log_dir="a")))
        environment = {"SLURM_RESTART_COUNT": restarts, "SLURM_JOB_ID": job}
        return reports(requeue_problems(config, environment))

    assert codes("1") == codes("1", save="a-2") == []  # the run in `a` is no start of this job
    write_job(Path("a"), {"SLURM_JOB_ID": "7"})
    shutil.copytree("b", "a-2")
    write_job(Path("a-2"), {"SLURM_JOB_ID": "8"})
    assert (
        codes("1")
        == codes("1", load="b")
        == codes("1", "8")
        == ["add-flag: Slurm has started this job again"]
    )
    assert codes("0") == codes("1", load="a") == codes("1", no_save=True) == codes("1", save="new") == []
    assert codes("1", "9") == codes("1", "9", load="b") == []


def test_every_run_without_save_is_kept(tmp_path, ranks):
    """Three starts of one command with --log-dir, the last one to resume: nothing is lost or mixed."""
    files = make_files(tmp_path)
    argv = [word for word in flags(files, "run", "--dry-run") if word != "--no-save"]
    (dry,) = run_main(ranks, argv)
    assert dry.stdout.count(f"to {files / 'run'} after 15 minutes") == 1 and not (files / "run").exists()
    argv.remove("--dry-run")
    (first,) = run_main(ranks, argv)
    assert first.exit_code == 0 and f"saved checkpoint {files / 'run' / 'iter_0000002'}" in first.stdout
    before = {path: path.read_bytes() for path in (files / "run" / "iter_0000002").rglob("*.distcp")}
    (second,) = run_main(ranks, [*argv, "--lr", "1e-2"])
    assert second.exit_code == 0 and f"which --load {files / 'run'} would resume" in second.stdout
    assert {path: path.read_bytes() for path in before} == before
    assert (files / "run-2" / "iter_0000002").is_dir()
    metrics = [line for line in read_metrics(files / "run")]
    (third,) = run_main(ranks, [*argv, "--lr", "1e-2", "--load", str(files / "run-2"), "--train-iters", "3"])
    assert third.exit_code == 0 and "resumed from iteration 2" in third.stdout, third.stderr
    assert {path.name for path in (files / "run-2").glob("iter_*")} == {"iter_0000002", "iter_0000003"}
    assert [line["iteration"] for line in read_metrics(files / "run")] == [1, 2, 3]
    assert read_metrics(files / "run")[:2] == metrics
    (fourth,) = run_main(ranks, [*argv, "--load", str(files / "run"), "--train-iters", "3"])
    assert fourth.exit_code == 0 and "metrics of the earlier run" in fourth.stdout, fourth.stderr
    assert [line["iteration"] for line in read_metrics(files / "run")] == [3]  # of the first, not the third


def test_a_second_start_changes_nothing_of_the_first_run(tmp_path, ranks):
    """Start the same command twice, and once with a mistyped --load."""
    files = make_files(tmp_path)
    save = files / "save"
    argv = flags(files, "save", "--save", save)
    (first,) = run_main(ranks, argv)
    assert first.exit_code == 0, first.stderr
    before = {path: path.read_bytes() for path in save.rglob("*") if path.is_file()}
    for more in ((), ("--load", files / "typo")):
        (second,) = run_main(ranks, [*argv, *map(str, more), "--lr", "1e-2"])
        assert second.exit_code == 64 and f"--load {save}" in second.stderr, second.stderr
        assert {path: path.read_bytes() for path in save.rglob("*") if path.is_file()} == before
    assert [record["iteration"] for record in read_metrics(save)] == [1, 2] and not (files / "typo").exists()
