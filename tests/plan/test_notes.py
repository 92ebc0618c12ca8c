"""Check the notes below a plan: settings of teachers without effect, and teachers ahead that cost time."""

from __future__ import annotations

import pytest

from mkd.plan.forecast import Forecast
from mkd.plan.notes import plan_notes
from tests.plan.shapes import STUDENT, TEACHER, config

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--global-batch-size", 8, "--bf16")
PIPELINE = ("--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto")
GRPO = ("--on-policy-fraction", 1, "--prompt-data-path", "p", "--max-new-tokens", 64, "--rollout-prompts", 2)
GRPO += ("--reward", "rewards:exact", "--samples-per-prompt", 4)


def forecast(*argv: str | int, teachers=()) -> Forecast:
    return Forecast.from_config(config(*BASE, *argv), 4, STUDENT, teachers)


@pytest.mark.parametrize("more", [(), GRPO])
def test_plain_training_names_the_settings_of_teachers_that_it_does_not_read(more):
    """A configuration of a distillation becomes its baseline with one flag."""
    given = ("--teacher-hf", "t", "--teacher-precision", "fp8", "--teacher-residency", "peers")
    plain = forecast("--kd-ratio", 0, *given, "--teacher-prefetch", 3, "--xtoken-loss", "gold", *more)
    (note,) = plan_notes(plain)
    named = "--teacher-hf, --teacher-residency, --teacher-precision, --xtoken-loss, --teacher-prefetch"
    text = "note: kd-ratio is 0, so no teacher runs; without effect: "
    assert note == text + named
    assert [*plan_notes(forecast("--kd-ratio", 0, *more))] == [f"{text}--teacher-hf"]


def test_a_distillation_and_a_reference_read_their_teachers():
    given = ("--teacher-hf", "t", "--teacher-residency", "host")
    for more in ((), ("--kd-ratio", 0, "--dpo-beta", 0.1)):
        assert not [*plan_notes(forecast(*given, *more, teachers=(TEACHER,)))]


def test_a_number_of_forwards_ahead_that_is_slower_than_none_is_named():
    known = ("--teacher-hf", "t", *PIPELINE, "--teacher-prefetch")
    one, without = (forecast(*known, number, teachers=(TEACHER,)) for number in (1, 0))
    slow_ms, fast_ms = one.pipeline_ms(), without.pipeline_ms()
    assert slow_ms > 1.5 * fast_ms
    shown = f"{slow_ms:.4g} ms, not {fast_ms:.4g} ms"
    assert [*plan_notes(one)] == [f"note: --teacher-prefetch 1 is slower than 0 here: {shown}"]
    for number in (0, 8, "auto"):
        assert not [*plan_notes(forecast(*known, number, teachers=(TEACHER,)))]
