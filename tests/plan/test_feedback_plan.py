"""Check that plans of losses of judged answers count the reference and the pass that scores."""

from __future__ import annotations

import pytest

from mkd.plan.batch import BatchPlan
from mkd.plan.cost import pair_cost
from mkd.plan.head import SCORED_LOGIT_BYTES, head_block_rows
from mkd.plan.layout import PipelineLayout
from mkd.plan.loss_card import loss_card
from mkd.plan.memory import predict_memory
from tests.plan.shapes import SEQ_LENGTH, STUDENT, config

DPO = ("--dpo-beta", 0.1, "--kd-ratio", 0)
CASES = (((), ()), (DPO, (STUDENT,)))


def test_the_head_of_the_student_runs_once_more_and_that_of_the_reference_once():
    """3 products of a training pass; then one each to score."""
    plain, dpo = (pair_cost(config("--kd-ratio", 0, *more), STUDENT, models, 1) for more, models in CASES)
    assert dpo.head_ms == pytest.approx(plain.head_ms * 5 / 3)
    assert dpo.teachers[0] and not plain.teachers


def test_memory_has_the_reference_and_the_block_that_is_scored():
    settings = config(*DPO, "--bf16")
    layout = PipelineLayout((28,), 1)
    parts = predict_memory(settings, STUDENT, [STUDENT], layout, [layout], BatchPlan.from_config(settings, 1))
    (rank,) = parts.ranks
    rows = head_block_rows(SEQ_LENGTH, STUDENT.vocab_size, SCORED_LOGIT_BYTES)
    assert rank.teacher_gib == pytest.approx(rank.student_gib, rel=1e-3)
    assert rank.transient_gib >= rows * STUDENT.vocab_size * SCORED_LOGIT_BYTES / 2**30


def test_the_loss_card_shows_dpo():
    card = loss_card(config(*DPO), STUDENT, [STUDENT])
    assert "1 DPO, nats per pair" in card and "-ln sigmoid(z), z = 0.1 " in card and "number of pairs" in card
    assert "DPOConfig(beta=0.1)" in card and "CE" not in card


def test_the_loss_card_shows_grpo_and_only_several_updates_cost_a_pass():
    fresh = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--samples-per-prompt", 8)
    grpo = (*fresh, "--reward", "rewards:exact", "--kd-ratio", 0.2, "--kd-divergence", "reverse_kl")
    one, several = config(*grpo), config(*grpo, "--rollout-updates", 2, "--clip-range", 0.1)
    card = loss_card(several, STUDENT, [STUDENT])
    assert "0.8 policy + 0.2 KD" in card and "clip(rho, 0.9, 1.1)" in card and "0.25: KD / policy" in card
    assert "R = rewards:exact" in card and "clip(" not in loss_card(one, STUDENT, [STUDENT])
    heads = [pair_cost(settings, STUDENT, (STUDENT,), 1).head_ms for settings in (one, several)]
    assert heads[1] / heads[0] > 1.1
