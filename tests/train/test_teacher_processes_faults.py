"""A process of a student's or a teacher's side that fails: all end in time, and name the same cause."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

from mkd.errors import EXIT_DONE, EXIT_USAGE
from tests.train.command import flags, make_files
from tests.train.processes import Ended, run_processes
from tests.train.test_teacher_processes_run import losses

# Ranks 0 and 1 are replicas of the student, 2 and 3 stages of the teacher.
APART = (
    "--teacher-processes",
    "2",
    "--teacher-pipeline-model-parallel-size",
    "2",
    "--teacher-pipeline-layout",
    "2,1",
)
RANKS, ITERATIONS, LIMIT_S = 4, 6, 4
DEAD = "it ended without a report: it was killed, or the host ran out of memory"
SILENT = "it gave no sign of life for 20 s: stopped, or its machine or network is gone"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("faults"))


def run(files, folder, name: str, *more, fault: str = "", ranks: int = RANKS, **others) -> list[Ended]:
    """Run, or resume, with a checkpoint after every second step."""
    saved = {"save": f"{name}/save", "load": f"{name}/save"}
    argv = flags(files, name, "--save-interval", 2, *more, **saved)
    apart = APART if ranks == RANKS else ("--teacher-processes", "1")
    return run_processes(folder, [*argv, *apart], ranks, fault=fault, **others)


def check_cause(ended: list[Ended], rank: int, cause: str, within_s: float = 10) -> None:
    """All others say in one line why they end, and with nothing else."""
    for number, one in enumerate(ended):
        if number != rank:
            line = f"rank {number}: stopped because rank {rank} failed: {cause}"
            assert one.output.count(" failed: ") == 1 and line in one.output, one.output
            assert one.code == 1 and one.after_s < within_s and "Traceback" not in one.output


@pytest.fixture(scope="module")
def undisturbed(files, tmp_path_factory):
    """Losses of a run without a fault."""
    ended = run(files, tmp_path_factory.mktemp("whole"), "whole", "--train-iters", ITERATIONS)
    assert [one.code for one in ended] == [EXIT_DONE] * RANKS, [one.output for one in ended]
    return losses(files / "whole")


@pytest.mark.slow
@pytest.mark.fault("37 killed")
@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 3), (2, 17), (3, 17)])
def test_a_process_that_is_killed(files, tmp_path, undisturbed, rank, step):
    """In the third step. A stage of the teacher counts rows, four in each step."""
    name, more = f"killed {rank}", ("--train-iters", ITERATIONS)
    ended = run(files, tmp_path, name, *more, fault=f"kill@in_step:{rank}:{step}")
    assert ended[rank].code == -9
    check_cause(ended, rank, DEAD)
    assert [one.code for one in run(files, tmp_path, name, *more)] == [EXIT_DONE] * RANKS
    assert losses(files / name) == undisturbed


@pytest.mark.slow
@pytest.mark.fault("37 stopped")
@pytest.mark.parametrize(("rank", "step"), [(0, 5), (1, 5), (2, 30), (3, 30)])
def test_a_process_that_is_stopped(files, tmp_path, rank, step):
    """Rank 0 hosts the store here, as without torchrun: that it stands still is seen by all."""
    name = f"stopped {rank}"
    ended = run(files, tmp_path, name, "--train-iters", 4000, fault=f"stop@in_step:{rank}:{step}")
    assert ended[rank].code == -9  # the test's own kill
    store = "the store of the launch, which it hosts, did not answer for 20 s: stopped, or its machine or"
    check_cause(ended, rank, SILENT if rank else store)
    last_step = (files / name / "metrics.jsonl").stat().st_mtime
    assert all(one.at - last_step < 32 for number, one in enumerate(ended) if number != rank)


@pytest.mark.slow
@pytest.mark.fault("37 hang")
def test_a_teacher_that_hangs(files, tmp_path):
    limit = ("--distributed-timeout-seconds-after-init", LIMIT_S, "--distributed-timeout-minutes", 1)
    ended = run(files, tmp_path, "hang", "--train-iters", 4000, *limit, fault="hang@in_step:2:40")
    assert [one.code for one in ended] == [1] * RANKS and max(one.after_s for one in ended) < 10
    for rank in range(RANKS):
        report = (files / "hang" / "errors" / f"rank_{rank}.txt").read_text()
        assert "most recent call first" in report, report
    assert any("no progress in forward_backward of iteration" in one.output for one in ended)


ERRORS = {
    "error": "RuntimeError: error@",
    "memory": "MemoryError: memory@",
    "oom": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (oom@",
}


@pytest.mark.fault("37 error")
@pytest.mark.parametrize(
    ("kind", "rank", "step"),
    [
        ("memory", 1, 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("error", 1, 20), ("oom", 1, 20)]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("error", 0, 4), ("memory", 0, 4)]),
    ],
)
def test_a_process_that_raises(files, tmp_path, kind, rank, step):
    name = f"{kind} {rank}"
    ended = run(files, tmp_path, name, "--train-iters", 400, fault=f"{kind}@in_step:{rank}:{step}", ranks=2)
    place = f"in_step:{rank}:{step}"
    assert ended[rank].code == 1 and "Traceback" in ended[rank].output
    words = f"rank {rank} failed first: {ERRORS[kind]}{place}"
    assert ended[rank].output.rstrip(")\n").endswith(words), ended[rank].output
    check_cause(ended, rank, f"{ERRORS[kind]}{place}")


@pytest.mark.slow
@pytest.mark.fault("37 start")
def test_a_process_with_other_settings(files, tmp_path):
    ended = run(files, tmp_path, "other settings", ranks=2, more={1: ("--seq-length", "64")})
    assert [one.code for one in ended] == [EXIT_USAGE] * 2
    cause = "error[ranks-chose-differently]: training.seq_length is 32 on rank 0 and 64 on rank 1"
    assert all(cause in one.output and "Traceback" not in one.output for one in ended)


@pytest.mark.slow
@pytest.mark.fault("37 start")
@pytest.mark.parametrize("missing", ["teacher", "student"])
def test_a_machine_without_a_file(files, tmp_path, missing):
    """Each rank has a machine, and that of the teacher lacks a folder: all end with its error."""
    machines = [tmp_path / f"machine {rank}" for rank in range(2)]
    for rank, place in enumerate(machines):
        place.mkdir()
        for name in ("student", "teacher", "text.jsonl"):
            if rank == 0 or name != missing:
                (place / name).symlink_to(files / name)
    paths = {"student_hf": "student", "teacher_hf": "teacher", "data_path": "text.jsonl"}
    argv = flags(files, "missing", "--train-iters", 2, student_hf=None, teacher_hf=None, data_path=None)
    argv += [word for name, path in paths.items() for word in (f"--{name.replace('_', '-')}", path)]
    ended = run_processes(tmp_path, [*argv, "--teacher-processes", "1"], 2, machines=machines)
    first, second = ended
    assert second.code == first.code > 1 and max(one.after_s for one in ended) < 10
    assert re.search(rf"error\[[a-z-]+\]: .*{missing}", second.output), second.output
    assert "stopped because rank 1 cannot start: " in first.output and "Traceback" not in first.output


@pytest.mark.slow
@pytest.mark.fault("37 start")
def test_a_teacher_that_fails_before_it_meets_the_student(files, tmp_path):
    ended = run(files, tmp_path, "early", "--train-iters", 4, fault="error@in_waiting:1:0", ranks=2)
    assert ended[1].output.endswith("rank 1 failed first: RuntimeError: error@in_waiting:1:0\n")
    check_cause(ended, 1, "RuntimeError: error@in_waiting:1:0")


@pytest.mark.slow
@pytest.mark.fault("37 reading")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_student_that_reads_data_for_long(files, tmp_path, ranks):
    """A single process may, and its teacher waits. Several wait for each other, with a limit."""
    limit = ("--distributed-timeout-minutes", 1)
    ended = run(files, tmp_path, f"long {ranks}", *limit, fault="pause@in_reading:0", ranks=ranks)
    if ranks == 2:
        assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
    else:
        assert all(one.code == 1 for one in ended), [one.output for one in ended]
        assert "no progress in reading the data for 60 s" in "".join(one.output for one in ended)


@pytest.mark.slow
@pytest.mark.fault("37 busy")
def test_a_busy_machine_raises_no_alarm(files, tmp_path):
    """Forty processes that calculate take the cores for a minute."""
    burn = "import time; end = time.monotonic() + 240\nwhile time.monotonic() < end: pass"
    with ExitStack() as stack:
        for _ in range(40):
            one = stack.enter_context(subprocess.Popen([sys.executable, "-c", burn]))
            stack.callback(one.kill)
        more = ("--train-iters", 12, "--distributed-timeout-minutes", 30)
        ended = run(files, tmp_path, "busy", *more, ranks=2, timeout_s=600)
    assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
