"""Check that plans of losses of judged answers count the reference and the pass that scores."""

from __future__ import annotations

import pytest

from mkd.kinds.loss_card import loss_card
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.footprint.head import SCORED_LOGIT_BYTES, head_block_rows
from mkd.plan.footprint.memory import predict_memory
from mkd.plan.forecast import Forecast
from tests.plan.shapes import SEQ_LENGTH, STUDENT, config, cost_of, trained

DPO = ("--dpo-beta", 0.1, "--kd-ratio", 0)
CASES = (((), ()), (DPO, (STUDENT,)))


def test_the_head_of_the_student_runs_once_more_and_that_of_the_reference_once():
    """3 products of a training pass; then one each to score."""
    plain, dpo = (cost_of(config("--kd-ratio", 0, *more), STUDENT, models, 1) for more, models in CASES)
    assert dpo.head_ms == pytest.approx(plain.head_ms * 5 / 3)
    assert dpo.teachers[0] and not plain.teachers


def test_memory_has_the_reference_and_the_block_that_is_scored():
    facts = trained(config(*DPO, "--bf16"), STUDENT, [STUDENT], microbatches=1)
    (rank,) = predict_memory(facts).ranks
    rows = head_block_rows(SEQ_LENGTH, STUDENT.vocab_size, SCORED_LOGIT_BYTES)
    assert rank.teacher_gib == pytest.approx(rank.student_gib, rel=1e-3)
    assert rank.transient_gib >= rows * STUDENT.vocab_size * SCORED_LOGIT_BYTES / 2**30


def test_the_loss_card_shows_dpo():
    card = loss_card(config(*DPO), STUDENT, [STUDENT])
    assert "1 DPO, nats per pair" in card and "-ln sigmoid(z), z = 0.1 " in card and "number of pairs" in card
    assert "DPOConfig(beta=0.1)" in card and "CE" not in card


def test_a_divergence_beside_rewards_has_a_pass_of_its_own():
    fresh = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--samples-per-prompt", 8)
    grpo = (*fresh, "--reward", "rewards:exact")
    alone = cost_of(config(*grpo, "--kd-ratio", 0), STUDENT, (), 1).head_ms
    beside = cost_of(config(*grpo, "--kd-ratio", 0.2), STUDENT, (STUDENT,), 1).head_ms
    assert beside == pytest.approx(alone * 7 / 3)  # 3 products of either training pass, one of the reference


def test_every_update_of_a_step_takes_its_time():
    fresh = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--samples-per-prompt", 8)
    flags = (*fresh, "--reward", "rewards:exact", "--kd-ratio", 0, "--bf16")
    one, three = (
        Forecast(trained(one, teachers=(), microbatches=1))
        for one in (config(*flags), config(*flags, "--rollout-updates", 3))
    )
    assert three.flops_per_step == 3 * one.flops_per_step
    assert three.step_ms() == pytest.approx(3 * (three.step.step_ms + three.optimizer_ms))
    whole_ms = 3 * (three.step.step_ms + three.optimizer_ms)
    assert three.planned_step_ms() == pytest.approx(whole_ms)
    assert f"3 updates of a step's completions: {whole_ms:.4g} ms" in describe_forecast(three)
    assert "updates of" not in describe_forecast(one)


def test_the_loss_card_says_that_a_reference_is_in_fp8():
    assert "FP8" not in loss_card(config(*DPO), STUDENT, [STUDENT])
    card = loss_card(config(*DPO, "--bf16", "--teacher-precision", "fp8"), STUDENT, [STUDENT])
    assert "rejected one; r of layers in FP8 (E4M3, tensorwise scales)" in card


def test_the_loss_card_shows_grpo_and_only_several_updates_cost_a_pass():
    fresh = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--samples-per-prompt", 8)
    grpo = (*fresh, "--reward", "rewards:exact", "--kd-ratio", 0.2, "--kd-divergence", "reverse_kl")
    one, several = config(*grpo), config(*grpo, "--rollout-updates", 2, "--clip-range", 0.1)
    card = loss_card(several, STUDENT, [STUDENT])
    assert "0.8 policy + 0.2 KD" in card and "clip(rho, 0.9, 1.1)" in card and "0.25: KD / policy" in card
    assert "R = rewards:exact" in card and "clip(" not in loss_card(one, STUDENT, [STUDENT])
    heads = [cost_of(settings, STUDENT, (STUDENT,), 1).head_ms for settings in (one, several)]
    assert heads[1] / heads[0] > 1.1
