import math
import random

import pytest

from mkd.config.schema import PAIR_LOSSES
from mkd.kinds.known_kinds import METRICS
from mkd.log.metrics import IntervalAverager

CONTRACT_KEYS = [
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "loss",
    "ce_loss",
    "kd_loss",
    "teacher_ce",
    "teacher_entropy",
    "top1_agreement",
    "grad_norm",
    "learning_rate",
    "num_loss_tokens",
    "step_time_ms",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "skipped_iterations",
]


def test_registry_holds_the_contract_keys_once_in_order():
    more = [
        "teacher_share",
        "expert_load_max_over_mean",
        "expert_load_worst_layer",
        "loss_spikes",
        "gap_closed",
        "consumed_prompts",
    ]
    own_text = ["length", "truncated", "repetition", "entropy", "teacher_nll"]
    own_text += [f"kl_quarter_{number}" for number in (1, 2, 3, 4)]
    more += [
        "feedback_loss",
        "peak_memory_gib",
        *(f"{loss.prefix}/{name}" for loss in PAIR_LOSSES for name in ("margin", "accuracy")),
    ]
    more += [f"reward/{name}" for name in ("mean", "std0_groups", "failed", "clipped")]
    more.append("weighted_ce_loss")
    records = ["stale", "duplicate", "left_out", "bad_records"]
    own_text += ["coverage", "logp_gap", "version_lag", *records, "time_ms"]
    more += [f"rollout/{name}" for name in own_text]
    more += ["teacher_wait_ms", "teacher_idle_share"]
    assert [metric.name for metric in METRICS.metrics] == CONTRACT_KEYS + more
    assert all(metric.unit and metric.help for metric in METRICS.metrics)


def test_key_of_one_teacher_is_a_kd_loss():
    assert METRICS.find("kd_loss/qwen-7b").name == "kd_loss"
    with pytest.raises(KeyError):
        METRICS.find("kl_loss")


def test_one_step_is_reported_as_it_is():
    averager = IntervalAverager(METRICS)
    averager.add(
        {"loss": 30.0, "ce_loss": 20.0, "kd_loss": 40.0, "num_loss_tokens": 10.0},
        iteration=5,
        consumed_samples=40,
        grad_norm=1.5,
        learning_rate=1e-4,
        step_time_ms=800.0,
        tokens_per_s_per_gpu=1234.0,
        tflops_per_gpu=0.5,
        skipped_iterations=0,
    )
    record = averager.flush()
    assert record == {
        "iteration": 5,
        "consumed_samples": 40,
        "loss": 3.0,
        "ce_loss": 2.0,
        "kd_loss": 4.0,
        "grad_norm": 1.5,
        "learning_rate": 1e-4,
        "num_loss_tokens": 10,
        "step_time_ms": 800.0,
        "tokens_per_s_per_gpu": 1234.0,
        "tflops_per_gpu": 0.5,
        "skipped_iterations": 0,
    }
    assert list(record) == [key for key in CONTRACT_KEYS if key in record]
    assert {type(record[key]) for key in ("iteration", "num_loss_tokens", "skipped_iterations")} == {int}


def test_interval_is_sums_over_sums_not_a_mean_of_means():
    averager = IntervalAverager(METRICS)
    averager.add({"loss": 10.0, "num_loss_tokens": 10})  # mean 1
    averager.add({"loss": 900.0, "num_loss_tokens": 300})  # mean 3
    assert averager.flush() == {"loss": 910 / 310, "num_loss_tokens": 310}


def test_lines_weighted_by_their_tokens_give_the_mean_of_the_run():
    generator = random.Random(0)
    steps = [(generator.uniform(-5, 5), generator.randrange(0, 50)) for _ in range(12)]
    lines = []
    for start in range(0, 12, 4):
        averager = IntervalAverager(METRICS)
        for loss, tokens in steps[start : start + 4]:
            averager.add({"loss": loss * tokens, "num_loss_tokens": tokens})
        lines.append(averager.flush())
    whole = sum(loss * tokens for loss, tokens in steps) / sum(tokens for _, tokens in steps)
    weighted = sum(line["loss"] * line["num_loss_tokens"] for line in lines)
    assert weighted / sum(line["num_loss_tokens"] for line in lines) == pytest.approx(whole, rel=1e-12)


def test_loss_identity_survives_the_interval():
    averager, ratio = IntervalAverager(METRICS), 0.3
    for ce, kd, tokens in ((20.0, 5.0, 7), (3.0, 90.0, 31), (0.0, 0.0, 0)):
        sums = {
            "loss": (1 - ratio) * ce + ratio * kd,
            "ce_loss": ce,
            "kd_loss": kd,
            "num_loss_tokens": tokens,
        }
        averager.add(sums)
    record = averager.flush()
    assert record["loss"] == pytest.approx(
        (1 - ratio) * record["ce_loss"] + ratio * record["kd_loss"], rel=1e-12
    )


def test_other_reductions_over_two_steps():
    averager = IntervalAverager(METRICS)
    averager.add(
        {"num_loss_tokens": 1},
        iteration=1,
        grad_norm=9.0,
        step_time_ms=1000.0,
        tokens_per_s_per_gpu=100.0,
        skipped_iterations=1,
    )
    averager.add(
        {"num_loss_tokens": 1},
        iteration=2,
        grad_norm=2.0,
        step_time_ms=3000.0,
        tokens_per_s_per_gpu=300.0,
        skipped_iterations=1,
    )
    record = averager.flush()
    assert record["grad_norm"] == 2.0 and record["iteration"] == 2 and record["skipped_iterations"] == 2
    assert record["step_time_ms"] == 2000.0
    assert record["tokens_per_s_per_gpu"] == (100 + 900) / 4  # 1000 tokens in 4 s


def test_flush_starts_afresh_and_absent_metrics_stay_absent():
    averager = IntervalAverager(METRICS)
    averager.add({"loss": 4.0, "kd_loss/small": 2.0, "num_loss_tokens": 2})
    assert list(averager.flush()) == ["loss", "kd_loss/small", "num_loss_tokens"]
    averager.add({"ce_loss": 6.0, "num_loss_tokens": 2})
    assert averager.flush() == {"ce_loss": 3.0, "num_loss_tokens": 2}
    assert averager.flush() == {}


def test_nothing_is_clamped_or_hidden():
    averager = IntervalAverager(METRICS)
    averager.add(
        {"kd_loss": -4.0, "ce_loss": math.inf, "loss": 0.0, "num_loss_tokens": 2}, grad_norm=math.nan
    )
    record = averager.flush()
    assert record["kd_loss"] == -2.0 and record["ce_loss"] == math.inf and record["loss"] == 0.0
    assert math.isnan(record["grad_norm"])


def test_mean_over_no_loss_tokens_does_not_exist():
    averager = IntervalAverager(METRICS)
    averager.add({"loss": 0.0, "num_loss_tokens": 0})
    record = averager.flush()
    assert math.isnan(record["loss"]) and record["num_loss_tokens"] == 0


def test_sums_and_values_are_not_mixed_up():
    with pytest.raises(AssertionError):
        IntervalAverager(METRICS).add({"num_loss_tokens": 1}, loss=1.0)
    with pytest.raises(AssertionError):
        IntervalAverager(METRICS).add({"grad_norm": 1.0, "num_loss_tokens": 1})
