"""Check the open log interval of a checkpoint: as it is saved now, and as earlier versions saved it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mkd.checkpoint.folders import TrainingPosition
from mkd.kinds.known_kinds import METRICS
from mkd.log.progress import MegatronLines
from mkd.plan.parallel_sizes import Sizes
from mkd.train.report import Reporter
from mkd.train.step import StepResult
from mkd.train.sums import LossSums, TermSums

CPU = SimpleNamespace(rank=1, world_size=1, sizes=Sizes(), platform=SimpleNamespace(is_cuda=False))
OLD = {  # the state of one step of 10 loss tokens, as mkd 0.1.0.dev0 wrote it
    "steps": 1,
    "sums": {
        "loss": [30.0, 10],
        "ce_loss": [20.0, 10],
        "kd_loss": [40.0, 10],
        "num_loss_tokens": [10, 1],
        "iteration": [1, 1],
        "step_time_ms": [500.0, 1],
        "skipped_iterations": [0, 1],
    },
}


@pytest.fixture
def reporter(monkeypatch):
    """Return reporter() -> (Reporter that logs every second step, list of its records)."""
    monkeypatch.setattr(Reporter, "_flops", lambda self, microbatches: 0)

    def make():
        records = []
        logger = SimpleNamespace(write=records.append)
        sizes = dict(log_interval=2, lines=MegatronLines(4, 4), global_batch_size=4, seq_length=32)
        return Reporter(
            CPU, logger, metrics=METRICS, student=None, teachers={}, kd_ratio=0.5, **sizes
        ), records

    return make


def add_step(reporter, iteration, ce, kd, tokens, is_applied=True):
    """Report a step of one teacher with the student's tokens."""
    teacher = TermSums(kd=kd, weight=tokens, rows=tokens, ce=1.0, entropy=1.0, tokens=tokens, compared=tokens)
    sums = LossSums(0.5, ce, tokens, {"teacher": teacher})
    position = TrainingPosition(iteration=iteration, consumed_samples=4 * iteration)
    reporter.train(position, StepResult(sums, 1.0, 1e-3, 500.0, is_applied), [])


def test_a_saved_interval_continues_with_the_same_bits(reporter):
    (whole, expected), (first, _), (second, found) = reporter(), reporter(), reporter()
    for one in (whole, first):
        add_step(one, 1, ce=20.1, kd=40.7, tokens=11)
    second.go_on(json.loads(json.dumps(first.open_interval)))
    for one in (whole, second):
        add_step(one, 2, ce=5.3, kd=3.9, tokens=7)
    assert found == expected and found[0]["num_loss_tokens"] == 18
    assert found[0]["kd_loss"] == pytest.approx((40.7 + 3.9) / 18, rel=1e-12)


def test_figures_of_an_interval_are_about_its_steps_since_the_start(reporter):
    """Earlier measurements are unknown, such as the waits for teachers on other processes."""
    (first, _), (second, records) = reporter(), reporter()
    add_step(first, 1, ce=1.0, kd=1.0, tokens=5)
    second.of_interval = {"teacher_wait_ms": lambda interval: 30.0 / interval.steps}
    second.go_on(json.loads(json.dumps(first.open_interval)))
    for iteration in (2, 3, 4):
        add_step(second, iteration, ce=1.0, kd=1.0, tokens=5)
    assert [one["teacher_wait_ms"] for one in records] == [30.0, 15.0]


def test_all_updates_of_a_step_count(reporter, monkeypatch):
    monkeypatch.setattr(Reporter, "_flops", lambda self, microbatches: 10**12)
    (one, _), (two, records) = reporter(), reporter()
    two.updates = 3
    for iteration in (1, 2):
        add_step(two, iteration, ce=1.0, kd=1.0, tokens=5)
    assert one.updates == 1 and records[0]["tflops_per_gpu"] == pytest.approx(3 / 0.5)


def test_an_interval_of_an_earlier_version_continues(reporter):
    resumed, records = reporter()
    resumed.go_on(json.loads(json.dumps(OLD)))
    add_step(resumed, 2, ce=5.0, kd=10.0, tokens=5)
    (record,) = records
    assert record["num_loss_tokens"] == 15
    assert record["ce_loss"] == pytest.approx(25 / 15) and record["kd_loss"] == pytest.approx(50 / 15)
    assert record["loss"] == pytest.approx(0.5 * record["ce_loss"] + 0.5 * record["kd_loss"])


def test_steps_without_an_update_have_no_loss(reporter):
    one, records = reporter()
    add_step(one, 1, ce=float("nan"), kd=1.0, tokens=5, is_applied=False)
    assert one.open_interval["losses"] == []
    add_step(one, 2, ce=float("nan"), kd=1.0, tokens=5, is_applied=False)
    (record,) = records
    assert (
        record["num_loss_tokens"] == 0
        and record["skipped_iterations"] == 2
        and record["loss"] != record["loss"]
    )
