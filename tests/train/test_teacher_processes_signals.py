"""A signal to any process of any side, in any phase: the run saves its step, and all end with 75."""

from __future__ import annotations

import json
import re
import signal

import pytest

from mkd.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from tests.operations.test_stopping import run_and_signal
from tests.train.command import flags, make_files, read_metrics
from tests.train.processes import run_processes

APART = ("--teacher-processes", 1)
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
TEACHER, ALL = False, True  # the last rank is the teacher's
EVALUATION = ("--eval-interval", 1, "--eval-iters", 3000)
EVERY_STEP = ("--save-interval", 1, "--keep-checkpoints", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    files = make_files(tmp_path_factory.mktemp("signals"))
    (files / "long.jsonl").write_text((files / "text.jsonl").read_text() * 200)
    return files


def check_saved(files, run: str, number: int, codes: list[int], output: str) -> int:
    """All processes agree on the end, and what was trained is saved. Return the iteration."""
    assert codes == [EXIT_PREEMPTED] * 2, output[-3000:]
    assert f"received {number.name}" in output
    for rank in range(2):
        printed = (files / f"{run}-{rank}.out").read_text()
        assert "Traceback" not in printed and not re.search(r"rank \d+ failed", printed), printed[-3000:]
    marker = json.loads((files / run / "PREEMPTED").read_text())
    assert marker["reason"] == f"received {number.name}"
    pointer = files / run / "latest_checkpointed_iteration.txt"
    saved = int(pointer.read_text()) if pointer.exists() else 0
    assert saved == marker["iteration"] and not list((files / run).glob("*.partial"))
    return saved


CASES = [
    (TERM, TEACHER, "step"),
    *((number, to_all, "step") for number in (USR1, INT) for to_all in (TEACHER, ALL)),
    (TERM, ALL, "step"),
    *((TERM, to_all, phase) for phase in ("load", "first step", "save") for to_all in (TEACHER, ALL)),
    *((TERM, to_all, "evaluation") for to_all in (TEACHER, ALL)),
]


@pytest.mark.fault("37 signal")
@pytest.mark.parametrize(
    ("number", "to_all", "phase"),
    [pytest.param(*one, marks=pytest.mark.slow if place else ()) for place, one in enumerate(CASES)],
)
def test_a_signal_in_every_phase(files, number, to_all, phase):
    """Those that a teacher's process gets are passed on: its machine may be the only one that is warned."""
    run = f"{number.name} {'all' if to_all else 'teacher'} {phase}"
    folder, more = files / run, []
    after = {
        "load": "CPU platform",
        "first step": "packs of 32 tokens",
        "step": "iteration        2/",
        "evaluation": "packs of 32 tokens",
        "save": lambda: list(folder.glob("*.partial")),
    }[phase]
    if phase == "evaluation":
        more = ["--valid-data-path", files / "long.jsonl", *EVALUATION]
    elif phase == "save":
        more = EVERY_STEP
    codes, output = run_and_signal(files, run, number, *APART, *more, to_group=to_all, after=after)
    saved = check_saved(files, run, number, codes, output)
    records = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    done = [one["iteration"] for one in records if "split" not in one or one["split"] == "train"]
    assert done == list(range(1, saved + 1)), "what was trained is not what was saved"
    if phase == "evaluation":
        assert "validation loss" not in output and saved == 0
    elif phase == "step":
        assert saved >= 2
        again = ["--train-iters", saved + 2, "--save", folder, "--load", folder, *APART]
        ended = run_processes(folder, flags(files, run, *again), 2)
        assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
        assert read_metrics(folder)[-1]["iteration"] == saved + 2


@pytest.mark.slow
@pytest.mark.fault("37 signal")
def test_limits_of_its_own_end_a_run(files, tmp_path):
    """--exit-duration-in-mins, and --exit-interval: states that were asked for ahead are dropped."""
    for run, more in (("time", ("--exit-duration-in-mins", 0.25)), ("steps", ("--exit-interval", 3))):
        argv = flags(files, run, "--train-iters", 40000, *more, *APART, save=files / run)
        ended = run_processes(tmp_path, argv, 2)
        assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
        assert "Traceback" not in ended[0].output + ended[1].output
        saved = int((files / run / "latest_checkpointed_iteration.txt").read_text())
        assert saved == read_metrics(files / run)[-1]["iteration"] > 0
        assert run == "time" or saved == 3


@pytest.mark.slow
@pytest.mark.fault("37 no end")
def test_a_teacher_that_is_never_told_to_end(files):
    """The student hangs after its last step, where nothing limits it. A signal limits the teacher."""
    more = ("--distributed-timeout-minutes", 0.2, "--distributed-timeout-seconds-after-init", 12)
    steps = ("--exit-interval", 2)
    codes, output = run_and_signal(
        files, "no end", TERM, *APART, *more, *steps, after="iteration        2/", fault="hang@in_end:0"
    )
    assert codes == [1, 1], output[-3000:]
    of_teacher = (files / "no end-1.out").read_text()
    assert re.search(r"rank 1: no progress in waiting for the student for 12 s", of_teacher), of_teacher
    assert "in end of iteration 2 for" in output and "most recent call first" in output
    assert int((files / "no end" / "latest_checkpointed_iteration.txt").read_text()) == 2


@pytest.mark.slow
@pytest.mark.fault("13 twice")
def test_the_second_ctrl_c_ends_both_sides(files):
    """The student hangs in its third step, after two saves, which stay."""
    run, hang = "twice", dict(after="iter_0000002", fault="hang@in_step:0:3", again_after="again to stop now")
    codes, output = run_and_signal(files, run, INT, *APART, "--save-interval", 1, to_group=True, **hang)
    of_teacher = (files / f"{run}-1.out").read_text()
    assert codes == [EXIT_INTERRUPTED] * 2, output[-2000:] + of_teacher[-2000:]
    assert "Traceback" not in output + of_teacher and "lost contact" not in output + of_teacher
    assert f"stopping now; {files / run / 'iter_0000002'} is saved" in output
    assert int((files / run / "latest_checkpointed_iteration.txt").read_text()) == 2
