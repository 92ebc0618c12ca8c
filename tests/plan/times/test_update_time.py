"""Check the time of an update against counts by hand, and against a measurement."""

from __future__ import annotations

from math import inf

import pytest

from mkd.plan.footprint.memory import predict_memory
from mkd.plan.times.layer_time import Rates
from mkd.plan.times.update_time import update_ms
from tests.plan.shapes import STUDENT, config, cost_of, qwen3_moe, trained

PARAMETERS = 28 * (2048 * 128 * 2 * 24 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128) + 151936 * 2048 + 2048


def update_of(*flags, shape=STUDENT, data_parallel=1, layers="28", clips=True, rates=None) -> float:
    facts = trained(config(*flags), shape, data_parallel=data_parallel, layouts=[layers])
    return update_ms(predict_memory(facts).ranks, facts.config.training.bf16, clips, rates)


def test_every_parameter_moves_50_bytes():
    """4 of zeros, 4 for the norm, 8 to clip, 28 in Adam, 6 from fp32 to bf16."""
    assert update_of() == pytest.approx(PARAMETERS * 50 / 4.25e9)
    assert update_of(clips=False) == pytest.approx(PARAMETERS * 42 / 4.25e9)


def test_weights_in_fp32_are_not_copied():
    assert update_of("--no-bf16") == pytest.approx(PARAMETERS * 44 / 4.25e9)


def test_a_distributed_optimizer_updates_a_part_and_zeros_all():
    spread = update_of("--use-distributed-optimizer", data_parallel=4)
    assert spread == pytest.approx(PARAMETERS * (4 + 46 / 4) / 4.25e9)


def test_the_slowest_pipeline_rank_counts():
    """The first of 20 and 8 layers: both ranks have a table of the vocabulary."""
    slowest = update_of("--pipeline-model-parallel-size", 2, layers="20,8")
    of_layers = 20 * (2048 * 128 * 2 * 24 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128)
    assert slowest == pytest.approx((of_layers + 151936 * 2048) * 50 / 4.25e9)


def test_update_and_additions_take_what_was_measured():
    """67 ms of a step of 4 micro-batches: 3 layers of Qwen3-30B-A3B on an H100 (docs/moe.md).

    Row copies take as much of forward as of backward, so that the rest of the latter is additions.
    """
    shape, h100 = qwen3_moe(3, 2048, 768, 32), Rates(copy=4.25 * 3.35 / 4.8)
    copying, free = (
        cost_of(config(), shape, (), 1, rates=rates).student for rates in (h100, Rates(copy=inf))
    )
    added_ms = sum(one.backward_ms - one.forward_ms for one in copying)
    added_ms -= sum(one.backward_ms - one.forward_ms for one in free)
    update = update_of(shape=shape, layers="3", rates=h100)
    assert update + 4 * added_ms == pytest.approx(67, rel=0.02)
