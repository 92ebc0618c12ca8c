"""The folders of --save and --load that a run may start with."""

from __future__ import annotations

import pytest

from mkd.checkpoint.folders import POINTER
from mkd.config.schema import CheckpointConfig
from mkd.operations.run_folders import start_problems
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
