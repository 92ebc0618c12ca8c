"""A run that crashes in the same step at every start is refused; other ends do not count."""

from __future__ import annotations

import pytest

from mkd.config.schema import Config, TrainingConfig
from mkd.errors import (
    CheckpointError,
    CrashLoop,
    DataError,
    NonFiniteError,
    OutOfMemory,
    Preempted,
    UsageError,
)
from mkd.operations.crash_loop import RUNNING, CrashCounter
from tests.reported import refused
from tests.train.command import flags, make_files, read_metrics, run_main
from tests.train.processes import run_processes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("crashes"))


def crash_in(folder, step, config=None):
    """Simulate a run that reaches `step` and is killed."""
    CrashCounter.start(folder, config or Config()).reached(step)


@pytest.mark.fault(16)
def test_three_crashes_of_one_step(tmp_path):
    for _ in range(3):
        crash_in(tmp_path, 7)
    for _ in range(2):  # until something changes
        with refused("crash-loop") as caught:
            CrashCounter.start(tmp_path, Config())
        assert caught.value.exit_code == 76 and str(tmp_path / RUNNING) in caught.value.do
    CrashCounter.start(tmp_path, Config(training=TrainingConfig(seed=5)))
    crash_in(tmp_path, 7)


@pytest.mark.parametrize("steps", [(7, 7, 8, 8, 7), (0, 0, 7, 0, 0), (100, 10, 1, 100)])
def test_other_steps_are_progress(steps, tmp_path):
    for step in steps:
        crash_in(tmp_path, step)
    CrashCounter.start(tmp_path, Config())


def test_an_end_that_is_no_crash_starts_anew(tmp_path):
    for _ in range(2):
        crash_in(tmp_path, 7)
    counter = CrashCounter.start(tmp_path, Config())
    counter.reached(7)
    counter.end()
    assert not (tmp_path / RUNNING).exists()
    for _ in range(2):
        crash_in(tmp_path, 7)
    CrashCounter.start(tmp_path, Config())


@pytest.mark.parametrize("content", ["", "garbage", "7\n", "7\n{}\n", "x\n{}\n", '7\n{"times": 5}\n'])
def test_a_marker_that_cannot_be_read_is_none(content, tmp_path):
    (tmp_path / RUNNING).write_text(content)
    CrashCounter.start(tmp_path, Config())


@pytest.mark.slow
@pytest.mark.fault(16)
def test_the_command_stops_with_76(files, tmp_path):
    """Use real processes: killed, failed, killed, each in step 3, after the checkpoint of step 2."""
    save = tmp_path / "save"
    argv = flags(files, "loop", "--train-iters", 6, "--save", save, "--load", save, "--save-interval", 2)
    codes = []
    for fault in ("kill@in_step::3", "error@in_step::3", "kill@in_step::3", ""):
        (result,) = run_processes(tmp_path, argv, 1, fault=fault)
        codes.append(result.code)
    assert codes == [-9, 1, -9, 76]
    assert f"error[crash-loop]: the last 3 runs in {save} all crashed in step 3\n  why: " in result.output
    assert [line["iteration"] for line in read_metrics(files / "loop")] == [1, 2]


@pytest.mark.parametrize(
    ("error", "is_crash"),
    [
        (None, False),
        (RuntimeError(), True),
        (OutOfMemory("", code="example"), True),
        (UsageError("", code="example"), False),
        (DataError("", code="example"), False),
        (CheckpointError("", code="example"), False),
        (NonFiniteError("", code="example"), False),
        (Preempted("", code="example"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_which_ends_are_crashes(error, is_crash, tmp_path):
    """Only errors with exit code 1 are crashes; a run that was refused or told to end has not crashed."""
    for _ in range(3):
        counter = CrashCounter.start(tmp_path, Config())
        counter.reached(7)
        counter.end(error)
        assert (tmp_path / RUNNING).exists() == is_crash
    if is_crash:
        with pytest.raises(CrashLoop):
            CrashCounter.start(tmp_path, Config())


def test_refused_starts_never_become_a_crash_loop(files, ranks):
    save = files / "refused"
    argv = flags(files, "refused", "--save", save, "--load", save)
    (first,) = run_main(ranks, argv)
    again = [
        run_main(ranks, [*argv, "--train-iters", "3", "--kd-ratio", "0.1"])[0].exit_code for _ in range(5)
    ]
    assert first.exit_code == 0 and again == [66] * 5, first.stderr
    assert not (save / RUNNING).exists()
