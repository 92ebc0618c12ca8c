"""A peer that dies or hangs while others gather a teacher's layer: they end in time, and the run resumes."""

from __future__ import annotations

import re

import pytest

from tests.train.command import flags, make_files, read_metrics
from tests.train.invariance import PEERS
from tests.train.processes import run_processes
from tests.train.test_teacher_peers import values

LIMIT_S, ITERATIONS = 4, 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("faults"))


def run(files, folder, name: str, fault: str = ""):
    """Start or resume a run over two peers that saves every second step; return the ends of its processes."""
    more = ("--train-iters", ITERATIONS, "--save-interval", 2)
    limit = ("--distributed-timeout-seconds-after-init", LIMIT_S)
    argv = flags(files, name, *PEERS[2], *more, *limit, save=f"{name}/save", load=f"{name}/save")
    return run_processes(folder, argv, 2, fault=fault)


@pytest.fixture(scope="module")
def undisturbed(files, tmp_path_factory):
    """Metrics of a run without a fault."""
    assert [one.code for one in run(files, tmp_path_factory.mktemp("whole"), "whole")] == [0, 0]
    return values(read_metrics(files / "whole"))


def check_resumes(files, folder, name: str, undisturbed: list[dict]) -> None:
    assert [one.code for one in run(files, folder, name)] == [0, 0]
    assert values(read_metrics(files / name)) == undisturbed and len(undisturbed) == ITERATIONS


@pytest.mark.fault(18)
def test_a_peer_that_dies(files, tmp_path, undisturbed):
    first, second = run(files, tmp_path, "killed", "kill@in_gather:1:5")
    assert (first.code, second.code) == (1, -9) and first.after_s < 10
    assert first.output.endswith(
        "rank 0: lost contact with the other ranks, and none has said why: one was killed or hangs\n"
    )
    check_resumes(files, tmp_path, "killed", undisturbed)


@pytest.mark.fault(17)
def test_a_peer_that_hangs(files, tmp_path, undisturbed):
    """The other one waits in the gather, and its report shows that."""
    results = run(files, tmp_path, "hang", "hang@in_gather:1:5")
    assert [one.code for one in results] == [1, 1]
    last_step = (files / "hang" / "metrics.jsonl").stat().st_mtime
    for rank, place in enumerate(("all_gather_into_tensor", "bring_or_fail")):
        report = (files / "hang" / "errors" / f"rank_{rank}.txt").read_text()
        assert re.search(r"in forward_backward of iteration 5 for", report) and place in report
        assert LIMIT_S <= results[rank].at - last_step <= LIMIT_S + 2
    check_resumes(files, tmp_path, "hang", undisturbed)
