"""Check the short lines of a run: what they show, their widths and their columns."""

from __future__ import annotations

import math

import pytest

from mkd.human import (
    count,
    duration,
    fixed,
    floating_point,
    gpu_hours,
    milliseconds,
    number,
    scientific,
    tokens_per_s,
)
from mkd.kinds.known_kinds import METRICS
from mkd.log.compact import CompactLines
from mkd.log.progress import MegatronLines, build_lines
from tests.log.test_progress import RECORD

LINES = CompactLines(train_iters=30, more=METRICS.metrics)
LOSSES = ("loss", "ce_loss", "kd_loss")


def test_a_step_is_one_short_line():
    assert LINES.train(RECORD) == (
        "  5/30  loss 3.000  kd 4.0000  ce 2.123  top1 0.512  lr 5.0e-4  norm 1.23  812 ms  2.5k tok/s"
        "  eta   20 s"
    )


def test_an_evaluation_has_the_same_columns():
    record = RECORD | {"gap_closed": 0.25}
    step, valid = LINES.train(record), LINES.valid(record)
    assert valid == (
        "  5/30  loss 3.000  kd 4.0000  ce 2.123  top1 0.512  teacher ce 1.500  gap closed 0.2500  ppl 8.360"
        "  held-out"
    )
    assert step.partition("lr")[0] == valid.partition("teacher")[0]


@pytest.mark.parametrize("steps", [30, 9_999])
@pytest.mark.parametrize("value", [0.0, 1e-9, 0.12345, 9.99999, 123.456, 12345.6, 1e9, -3.21, math.nan])
def test_columns_keep_their_places(value, steps):
    lines = CompactLines(steps)
    line = lines.train(RECORD | dict.fromkeys((*LOSSES, "grad_norm"), value) | {"iteration": steps // 2})
    usual = lines.train(RECORD | {"iteration": steps // 2})
    assert len(line) <= 110
    if -1000 < value < 10_000:
        assert [line.index(label) for label in (" kd ", " ce ", " lr ")] == [
            usual.index(label) for label in (" kd ", " ce ", " lr ")
        ]


@pytest.mark.parametrize("step_time_ms", [0.5, 43.0, 999.7, 9_960.0, 59_600.0, 3e6])
@pytest.mark.parametrize("tokens", [0.4, 999.0, 9_960.0, 123_456.0, 2.5e6])
def test_times_and_speeds_stay_short(step_time_ms, tokens):
    record = RECORD | {"step_time_ms": step_time_ms, "tokens_per_s_per_gpu": tokens}
    assert len(CompactLines(9_999).train(record)) <= 110


def test_features_add_what_a_person_needs():
    dpo = {key: RECORD[key] for key in RECORD if key not in ("kd_loss", "ce_loss", "top1_agreement")}
    line = LINES.train(dpo | {"dpo/margin": 0.5, "dpo/accuracy": 0.75, "rollout/time_ms": 3.0})
    assert "  margin 0.5000  acc 0.75  " in line and " kd " not in line and "ms" in line
    line = LINES.train(RECORD | {"reward/mean": 0.5, "rollout/length": 120.2, "kd_loss/one": 1.0})
    assert "  reward 0.500  length  120  " in line and "top1" not in line and "one" not in line
    assert len(line) <= 110
    line = LINES.train(RECORD | {"skipped_iterations": 2, "loss_spikes": 1})
    assert line.endswith("s  skipped 2  spikes 1")


def test_the_flag_chooses_the_lines():
    assert build_lines("compact", 30, 8, METRICS.metrics) == LINES
    assert build_lines("megatron", 30, 8) == MegatronLines(30, 8)
    assert "| lm loss: 2.123456E+00 |" in MegatronLines(30, 8).train(RECORD)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"),
        (0.0432, "43.2 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (59.6, "1m00s"),
        (3599.7, "1h00m"),
        (86399, "1d00h"),
        (220_000, "2d13h"),
        (math.inf, "?"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_numbers_for_people():
    assert [count(n) for n in (0, 843.2, 999.6, 9_960, 130_000, 1.2e6)] == [
        "0",
        "843",
        "1.0k",
        "10k",
        "130k",
        "1.2M",
    ]
    assert [number(n) for n in (107_456, 134_515_008, 8_190_735_360)] == [
        "107,456",
        "134.5 million",
        "8.191 billion",
    ]
    assert [milliseconds(n) for n in (0.00123, 8.398, 243.4, 300, 1620, 43_770, 1_234_000)] == [
        "under 0.1 ms",
        "8.4 ms",
        "243.4 ms",
        "300 ms",
        "1620 ms",
        "43.8 s",
        "20m34s",
    ]
    assert [gpu_hours(n) for n in (0, 5.95e-7, 3.6, 12_345)] == [
        "0 GPU-hours",
        "under 0.01 GPU-hours",
        "3.6 GPU-hours",
        "12,300 GPU-hours",
    ]
    assert [floating_point(n) for n in (0, 8.43e8, 2.55e13, 9.996e14, 1.12e16, 3.4e21)] == [
        "0 FLOP",
        "843 MFLOP",
        "25.5 TFLOP",
        "1 PFLOP",
        "11.2 PFLOP",
        "3,400 EFLOP",
    ]
    assert [fixed(x, 5) for x in (0.12345, 12.3456, -0.5, 123456)] == ["0.123", "12.35", "-0.50", "1e+05"]
    assert [scientific(x) for x in (0, 1e-4, 3.14e-10)] == ["0.0e0", "1.0e-4", "3.1e-10"]


@pytest.mark.parametrize(
    ("tokens", "seconds", "text"),
    [
        (80, 251.0, "0.32 tokens/s"),
        (0, 30.0, "0 tokens/s"),
        (95, 10.0, "9.5 tokens/s"),
        (1_203_441, 372.0, "3,235 tokens/s"),
    ],
)
def test_a_slow_rate_is_not_zero(tokens, seconds, text):
    assert tokens_per_s(tokens, seconds) == text
