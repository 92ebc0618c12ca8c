"""A teacher on a GPU of its own, over NCCL, whose peer dies or stands still, and how idle it is."""

from __future__ import annotations

import pytest

from mkd.errors import EXIT_DONE
from tests.ranks import skip_unless_gpus_take
from tests.train.command import flags, make_files, read_metrics
from tests.train.processes import run_processes
from tests.train.test_teacher_processes_faults import DEAD, SILENT, check_cause

pytestmark = pytest.mark.gpu
APART = ("--bf16", "--teacher-processes", 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    skip_unless_gpus_take(2)
    return make_files(tmp_path_factory.mktemp("faults"))


def test_how_idle_the_teacher_is(files, tmp_path):
    """Nothing waits for a device, so that the first figures may be missing."""
    ended = run_processes(tmp_path, flags(files, "idle", "--train-iters", 200, *APART), 2, on_gpus=True)
    assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
    shares = [one["teacher_idle_share"] for one in read_metrics(files / "idle")[100:]]
    print("idle", shares[::20])
    assert all(0 <= one < 1 for one in shares)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed(files, tmp_path, rank):
    argv = flags(files, f"killed {rank}", "--train-iters", 40000, *APART)
    ended = run_processes(tmp_path, argv, 2, fault=f"kill@in_step:{rank}:40", on_gpus=True)
    check_cause(ended, rank, DEAD)


def test_a_teacher_that_is_stopped(files, tmp_path):
    argv = flags(files, "stopped", "--train-iters", 40000, *APART)
    ended = run_processes(tmp_path, argv, 2, fault="stop@in_step:1:400", on_gpus=True)
    check_cause(ended, 1, SILENT)
    last_step = (files / "stopped" / "metrics.jsonl").stat().st_mtime
    assert ended[0].at - last_step < 32
