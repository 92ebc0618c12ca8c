"""Check the notes below a plan: settings without effect, teachers ahead that cost time, slow CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.human import milliseconds
from mkd.plan.advice.cuda_graphs import planned_graphs
from mkd.plan.advice.notes import kernel_start_ms, plan_notes
from mkd.plan.forecast import Forecast
from tests.plan.shapes import STUDENT, TEACHER, config
from tests.run_facts import forecast_of
from tools.benchmarks.shapes import shape_of

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--global-batch-size", 8, "--bf16")
PIPELINE = ("--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto")
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
GRPO = ("--on-policy-fraction", 1, "--prompt-data-path", "p", "--max-new-tokens", 64, "--rollout-prompts", 2)
GRPO += ("--reward", "rewards:exact", "--samples-per-prompt", 4)


def forecast(*argv: str | int, teachers=()) -> Forecast:
    return forecast_of(config(*BASE, *argv), 4, STUDENT, teachers)


def notes_of_settings(planned: Forecast) -> list[str]:
    """Return the notes but that on the CPU, which is the limit of models of this size."""
    return [note for note in plan_notes(planned) if "the CPU may be the limit" not in note]


@pytest.mark.parametrize("more", [(), GRPO])
def test_plain_training_names_the_settings_of_teachers_that_it_does_not_read(more):
    """A configuration of a distillation becomes its baseline with one flag."""
    given = ("--teacher-hf", "t", "--teacher-precision", "fp8", "--teacher-residency", "peers")
    plain = forecast("--kd-ratio", 0, *given, "--teacher-prefetch", 3, "--xtoken-loss", "gold", *more)
    (note,) = notes_of_settings(plain)
    named = "--teacher-hf, --teacher-residency, --teacher-precision, --xtoken-loss, --teacher-prefetch"
    text = "note: no teacher runs, because --kd-ratio is 0. These settings have no effect: "
    assert note == text + named
    assert notes_of_settings(forecast("--kd-ratio", 0, *more)) == [f"{text}--teacher-hf"]


def test_settings_of_a_divergence_that_nothing_computes_are_named():
    given = ("--kd-ratio", 0, "--kd-temperature", 2, "--kd-divergence", "reverse_kl")
    (note,) = notes_of_settings(forecast(*given))
    assert note.endswith("have no effect: --teacher-hf, --kd-divergence, --kd-temperature")


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        ((), True),
        (("--student-rounding", "int8"), False),
        ((*GRPO, "--kd-divergence", "reverse_kl"), False),
        (("--dpo-beta", 0.1, "--kd-ratio", 0), False),
    ],
)
def test_a_teacher_that_is_the_student_itself_is_named(more, is_noted):
    found = notes_of_settings(forecast("--teacher-hf", "s", *more, teachers=(STUDENT,)))
    assert any("is the model that the student starts from, s" in note for note in found) == is_noted


def test_a_learning_rate_of_zero_is_named():
    noted = [
        notes_of_settings(forecast("--teacher-hf", "t", *more, teachers=(TEACHER,)))
        for more in ((), ("--lr", 0))
    ]
    assert noted == [[], ["note: --lr is 0, so that no weight changes"]]


def test_a_loss_without_a_reference_is_the_reason_why_no_teacher_runs():
    simpo = ("--teacher-hf", "t", "--kd-ratio", 0, "--simpo-beta", 2)
    text = (
        "note: no teacher runs, because SimPO has no reference. These settings have no effect: --teacher-hf"
    )
    assert notes_of_settings(forecast(*simpo)) == [text]


def test_a_distillation_and_a_reference_read_their_teachers():
    given = ("--teacher-hf", "t", "--teacher-residency", "host")
    for more in ((), ("--kd-ratio", 0, "--dpo-beta", 0.1)):
        assert not notes_of_settings(forecast(*given, *more, teachers=(TEACHER,)))


def test_a_number_of_forwards_ahead_that_is_slower_than_none_is_named():
    """The teacher's slow stages are not the student's, and two micro-batches leave no time to catch up."""
    known = ("--student-pipeline-layout", "1,1,4,22", "--teacher-pipeline-layout", "1,10,21,4")
    known = ("--teacher-hf", "t", "--pipeline-model-parallel-size", 4, *known)
    known = config(*BASE, *known, "--global-batch-size", 2), 4, STUDENT, (TEACHER,)
    one, without = (
        forecast_of(
            replace(known[0], parallel=replace(known[0].parallel, teacher_prefetch=number)), *known[1:]
        )
        for number in ("2", "0")
    )
    slow_ms, fast_ms = one.pipeline_ms(), without.pipeline_ms()
    assert slow_ms > 1.02 * fast_ms
    shown = f"a step takes {slow_ms:.4g} ms instead of {fast_ms:.4g} ms"
    assert notes_of_settings(one) == [
        f"note: --teacher-prefetch 2 is slower than --teacher-prefetch 0 here: {shown}"
    ]
    known = ("--teacher-hf", "t", *PIPELINE, "--teacher-prefetch")
    for number in (0, 1, 8, "auto"):
        assert not notes_of_settings(forecast(*known, number, teachers=(TEACHER,)))


def test_a_cpu_that_needs_longer_than_the_gpus_is_named():
    """The ranges contain what machines took: 767 to 2,025 ms at TP 2 and 4, else 805 to 1,251 ms."""
    pair = [shape_of(name) for name in ("qwen3-1.7b", "qwen3-8b")]

    def estimated(tokens, *more):
        argv = config(*BASE, "--teacher-hf", "t", "--seq-length", tokens, "--cuda-graphs", "off", *more)
        found = forecast_of(argv, 2, pair[0], pair[1:])
        notes = [*plan_notes(found)]
        if not notes:
            return None
        (text,) = notes
        assert ("tensor parallelism" in text) == ("--tensor-model-parallel-size" in more)
        fast_ms, slow_ms = kernel_start_ms(found.facts, planned_graphs(found))
        assert text.startswith("note: the CPU may be the limit: ")
        assert f" needs {milliseconds(fast_ms)} to {milliseconds(slow_ms)}, estimated" in text
        return fast_ms, slow_ms

    tensor = ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--global-batch-size", 4)
    fast_ms, slow_ms = estimated(8192, *tensor)
    assert fast_ms < 767 and slow_ms > 2025
    fast_ms, slow_ms = estimated(2048)
    assert fast_ms < 805 and slow_ms > 1251
    assert estimated(8192) is None, "one GPU's kernels take longer"
    pipeline = ("--pipeline-model-parallel-size", 2, "--global-batch-size", 4)
    assert estimated(2048, *pipeline) == (fast_ms / 2, pytest.approx(slow_ms / 2, rel=1e-3)), (
        "a rank has half of the layers"
    )
    block = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", 7)
    again_ms, _ = estimated(2048, *pipeline, *block)
    assert again_ms == pytest.approx(fast_ms / 2 + 4 * 7 * 1.4)
    again_ms, _ = estimated(2048, *pipeline, *RECOMPUTED)
    assert again_ms == pytest.approx(fast_ms / 2 + 4 * 14 * 1.4)
