"""If a rank hangs, the run ends in time, with the stack and the phase of every rank that can still answer."""

from __future__ import annotations

import re

import pytest

from tests.train.command import flags, make_files
from tests.train.processes import run_processes

LIMIT_S = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("watchdog"))


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_stopped_rank(files, tmp_path):
    """After SIGSTOP a rank cannot answer, and its peer reports that."""
    argv = flags(files, "stopped", "--train-iters", 4000, "--distributed-timeout-seconds-after-init", LIMIT_S)
    first, second = run_processes(tmp_path, argv, 2, fault="stop@in_data:1:4")
    assert first.code == 1 and second.code == -9  # the test's own kill
    report = files / "stopped" / "errors" / "rank_0.txt"
    for text in (first.output, report.read_text()):
        assert f"no progress in forward_backward of iteration 4 for {LIMIT_S} s" in text
        assert "most recent call first" in text and "count_rows" in text
    assert "rank 1: no answer: stopped, killed, or its machine is gone" in first.output
    last_step = (files / "stopped" / "metrics.jsonl").stat().st_mtime
    assert LIMIT_S <= first.at - last_step <= LIMIT_S + 2


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_rank_that_hangs_outside_of_communication(files, tmp_path):
    """Both ranks can answer, and report different phases."""
    argv = flags(files, "hang", "--train-iters", 4000, "--distributed-timeout-seconds-after-init", LIMIT_S)
    results = run_processes(tmp_path, argv, 2, fault="hang@in_data:1:3")
    assert [one.code for one in results] == [1, 1]
    for rank, place in enumerate(("forward_backward", "data")):
        assert re.search(rf"rank {rank}: (no progress )?in {place} of iteration 3 for", results[rank].output)
        assert "most recent call first" in (files / "hang" / "errors" / f"rank_{rank}.txt").read_text()
    last = max(results, key=lambda one: one.after_s).output
    assert all(f"  rank {rank}: " in last for rank in (0, 1)) and "no answer" not in last


@pytest.mark.slow
@pytest.mark.fault(18)
def test_a_rank_that_skips_a_collective(files, tmp_path):
    """Rank 1 is a step ahead and waits in another collective than rank 0."""
    argv = flags(files, "skip", "--train-iters", 4000, "--distributed-timeout-seconds-after-init", LIMIT_S)
    first, second = run_processes(tmp_path, argv, 2, fault="skip@in_optimizer:1:3")
    assert (first.code, second.code) == (1, 1) and max(first.after_s, second.after_s) < 10
    assert re.search(
        r"rank 0: no progress in optimizer of iteration 3|rank 0: stopped because rank 1 failed", first.output
    )
    assert re.search(r"rank 1: .*of iteration 4 for|rank 1: stopped because rank 0 failed", second.output)
    assert "no progress in" in first.output and "no progress in" in second.output


def test_the_clock_of_a_phase():
    """The first step and saves have the longer limit; a single process has none while it prepares data."""
    import math

    from mkd.operations.failures import FailureReports
    from mkd.operations.phases import TASK_EVALUATION
    from mkd.operations.watchdog import Watchdog

    alone, with_peer = (
        Watchdog(FailureReports(0, size), start_limit_s=600, step_limit_s=5) for size in (1, 2)
    )
    assert alone.limit_s() == math.inf and with_peer.limit_s() == 600
    limits = []
    for phase in ("data", "forward_backward", "optimizer", "data", "save", "eval", TASK_EVALUATION):
        with_peer.entered(phase, 1)
        limits.append(with_peer.limit_s())
    assert limits == [600, 600, 600, 5, 600, 5, math.inf]


@pytest.mark.parametrize(
    ("size", "side_size", "limit"), [(1, 1, None), (3, 1, None), (3, 2, 600), (2, 0, 600)]
)
def test_the_clock_while_data_is_read(size, side_size, limit):
    """A student's single process has none, also beside a teacher's processes; the rest of the start has."""
    import math

    from mkd.operations.failures import FailureReports
    from mkd.operations.phases import INIT, READING
    from mkd.operations.watchdog import Watchdog

    watchdog = Watchdog(FailureReports(0, size), start_limit_s=600, step_limit_s=5, side_size=side_size)
    limits = []
    for phase in (READING, INIT):
        watchdog.entered(phase, 0)
        limits.append(watchdog.limit_s())
    assert limits == [limit or math.inf, math.inf if size == 1 else 600]


def test_the_clock_of_a_teachers_own_process():
    """It may wait for the student without end, but after a signal no longer than a save may take."""
    import math

    import torch.distributed as dist

    from mkd.operations.failures import FailureReports
    from mkd.operations.heartbeat import Heartbeat
    from mkd.operations.phases import FORWARD_BACKWARD, WAITING
    from mkd.operations.signals import Signals
    from mkd.operations.watchdog import Watchdog

    watchdog = Watchdog(FailureReports(1, 2), start_limit_s=600, step_limit_s=5)
    watchdog.heartbeat = Heartbeat(dist.HashStore(), 1, 2, (0,), signals=Signals())
    limits = []
    for number, phase in enumerate((WAITING, FORWARD_BACKWARD, WAITING, FORWARD_BACKWARD, WAITING)):
        watchdog.entered(phase, number)
        limits.append(watchdog.limit_s())
    assert limits == [math.inf, 600, math.inf, 5, math.inf]
    watchdog.heartbeat.signals.received = 15
    assert watchdog.limit_s() == 600
