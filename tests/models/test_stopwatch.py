"""Check the time of blocks on CPUs and GPUs, and the teachers' share of a step."""

from __future__ import annotations

import time

import pytest
import torch

from mkd.models.stage import Stopwatch
from tests.train.command import flags, make_files, read_metrics


def test_blocks_add_up_until_they_are_read():
    stopwatch = Stopwatch()
    for seconds in (0.02, 0.03):
        with stopwatch.running(torch.device("cpu")):
            time.sleep(seconds)
        time.sleep(0.1)
    assert 50 <= stopwatch.take_ms() < 100
    assert stopwatch.take_ms() == 0


def test_blocks_that_have_ended():
    stopwatch = Stopwatch()
    for seconds in (0.02, 0.03):
        with stopwatch.running(torch.device("cpu")):
            time.sleep(seconds)
    number, ms = stopwatch.take_ended()
    assert number == 2 and 50 <= ms < 500
    assert stopwatch.take_ended() == (0, 0) and stopwatch.take_ms() == 0


@pytest.mark.gpu
def test_blocks_that_have_ended_on_a_gpu_are_not_waited_for():
    stopwatch, device = Stopwatch(), torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    a @ a
    torch.cuda.synchronize()
    with stopwatch.running(device):
        a.add_(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with stopwatch.running(device):
        for _ in range(50):
            a @ a
    assert stopwatch.take_ended()[0] == 1, "the first has ended, the second has not"
    waited_ms = 1000 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    number, ms = stopwatch.take_ended()
    assert number == 1 and ms > 2 * waited_ms


@pytest.mark.gpu
def test_the_time_of_a_gpu_is_that_of_its_kernels():
    stopwatch, device = Stopwatch(), torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    for _ in range(2):
        a @ a
        torch.cuda.synchronize()
        start = time.perf_counter()
        with stopwatch.running(device):
            for _ in range(20):
                a @ a
        queued_ms = 1000 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        passed_ms = 1000 * (time.perf_counter() - start)
        assert queued_ms < 0.5 * passed_ms, "the stopwatch has waited"
        assert stopwatch.take_ms() == pytest.approx(passed_ms, rel=0.1)


def run_with_slow_teachers(argv: list[str]) -> int:
    """Return the exit code of a run whose teachers take 60 ms longer for a micro-batch."""
    from mkd.models import stage
    from tests.train.command import call_main

    plain = stage._run

    def slow(model, row):
        time.sleep(0 if model.training else 0.06)
        return plain(model, row)

    stage._run = slow
    try:
        return call_main(argv)[0]
    finally:
        stage._run = plain


def test_the_share_of_the_teachers_in_a_run(tmp_path, ranks):
    """Only the steps count.

    The evaluations between them run as many micro-batches, through two models in this mode.
    """
    files = make_files(tmp_path)
    more = (
        "--log-interval",
        2,
        "--train-iters",
        4,
        "--eval-interval",
        1,
        "--eval-iters",
        1,
        "--split",
        "50,50,0",
    )
    assert ranks.run(run_with_slow_teachers, 1, flags(files, "run", *more)) == [0]
    lines = [line for line in read_metrics(files / "run") if "split" not in line]
    assert [line["iteration"] for line in lines] == [2, 4]
    for line in lines:
        teacher_ms = line["teacher_share"] * line["step_time_ms"]
        assert 4 * 60 <= teacher_ms < min(line["step_time_ms"], 8 * 60)
