"""Check splits of the processes between student and teacher: times, memory, the search, and its text.

The figures are those of today's plan for the pairs of which such a split was designed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.plan.advice.notes import plan_notes
from mkd.plan.advice.own_processes import describe_sides
from mkd.plan.advice.teacher_place import describe_places
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes, partners
from mkd.plan.teacher_split import (
    PlannedSplit,
    best_split,
    compared_processes,
    planned_splits,
    student_side,
    with_processes,
)
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER, STUDENT, TEACHER, config, cost_of, qwen3
from tests.run_facts import facts_of, forecast_of
from tools.benchmarks.shapes import shape_of

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--kd-ratio", 0.7)
SPREAD = "--use-distributed-optimizer"
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
FP8 = ("--teacher-precision", "fp8")
PP2 = ("--pipeline-model-parallel-size", 2, "--pipeline-layout", "auto")
LLAMA_8B = shape_of("llama3.1-8b")
LLAMA_70B = ModelShape.from_hf_config(
    dict(LLAMA_8B.hf_config)
    | dict(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
)
PAIRS = {
    "32B": (qwen3(36, 2560, 9728, 32, True), qwen3(64, 5120, 25600, 64, False)),
    "70B": (LLAMA_8B, LLAMA_70B),
    "235B": (MOE_STUDENT, MOE_TEACHER),
    "8B": (STUDENT, TEACHER),
}


def facts(pair: str, world_size: int, *argv):
    student, teacher = PAIRS[pair]
    return facts_of(config(*BASE, *argv), world_size, student, (teacher,))


def best(pair: str, world_size: int, gib: float, *argv) -> PlannedSplit:
    found = best_split(planned_splits(facts(pair, world_size, SPREAD, *argv), 0.95 * gib))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "pair, world_size, gib, argv, student, settings, teacher_ms, student_ms",
    [
        ("32B", 8, 80, (120, *FULL), 3, {"processes": 5}, 21506, 22532),
        ("32B", 8, 80, (120, *FULL, *FP8), 4, {"processes": 4}, 17148, 16930),
        ("70B", 16, 80, (120, *PP2, *FULL), 6, {"pipeline_model_parallel_size": 5}, 23371, 21321),
        ("70B", 16, 141, (120, *FP8), 6, {"processes": 10}, 14830, 15957),
        (
            "235B",
            64,
            80,
            (256, "--seq-length", 4096, "--expert-model-parallel-size", 8),
            32,
            {"pipeline_model_parallel_size": 8, "pipeline_layout": "12,12,12,12,12,12,11,11"},
            3885,
            3982,
        ),
    ],
)
def test_the_best_split(pair, world_size, gib, argv, student, settings, teacher_ms, student_ms):
    found = best(pair, world_size, gib, "--global-batch-size", *argv)
    assert found.student.facts.world_size == student and found.teacher.processes == world_size - student
    assert found.settings == {"processes": world_size - student} | settings
    assert (found.teacher_ms, found.student_ms) == pytest.approx((teacher_ms, student_ms), rel=3e-4)
    assert found.step_ms == max(found.teacher_ms, found.student_ms) > found.link_ms
    assert max(found.student_gib, found.teacher_gib) <= 0.95 * gib and found.links <= 8
    assert found.student_wait_ms == found.step_ms - found.student_ms


def test_sides_are_balanced_where_their_work_is():
    """T / G = W_T / (W_T + W_S), rounded to processes."""
    found = best("32B", 8, 80, "--global-batch-size", 120, *FULL, *FP8)
    own, teacher = found.student.student_step_ms() * 4, found.teacher.stage_ms * 120
    assert round(8 * teacher / (teacher + own)) == found.teacher.processes == 4
    assert found.lost_share == pytest.approx(0.5 * (1 - found.student_ms / found.step_ms))


def test_a_teacher_takes_its_forward_without_a_bubble():
    """All layers on one process, or a quarter of them on each of four."""
    run = facts("8B", 8, "--global-batch-size", 128)
    whole, stages = (
        PlannedSplit(Forecast.from_facts(student_side(run, one)), side)
        for one, side in _sides(run, Sizes(), Sizes(pipeline=4))
    )
    layers = cost_of(run.config, STUDENT, (TEACHER,), 1).teachers[0]
    assert whole.teacher.stage_ms == pytest.approx(sum(one.forward_ms for one in layers))
    assert whole.teacher_ms == pytest.approx(128 / 4 * whole.teacher.stage_ms)
    assert stages.teacher_ms == pytest.approx(whole.teacher_ms)
    weights = 36 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12288) * 2 / 2**30
    assert whole.teacher_gib - stages.teacher_gib > 0.5 * weights, "the last stage keeps states"
    assert whole.links == 1 and stages.links == 4


def _sides(run, *sizes):
    from mkd.plan.serving_side import TeacherSide

    for one in sizes:
        settings = with_processes(run.config, 4, one, TEACHER.num_layers)
        yield settings, TeacherSide.of(replace(run, config=settings), 0, TEACHER)


def test_the_student_keeps_the_head_alone():
    """Its side is a run with stored hidden states of half the processes, with one more state and links."""
    run = facts("8B", 8, "--global-batch-size", 128)
    (settings, _), *_ = _sides(run, Sizes())
    own = Forecast.from_facts(student_side(run, settings))
    stored = config(*BASE, "--teacher-hidden", "F", "--global-batch-size", 128)
    alone = forecast_of(stored, 4, STUDENT, heads=(TEACHER,))
    assert own.student_step_ms() == alone.planned_step_ms()
    assert own.planned_gib - alone.planned_gib == pytest.approx(8192 * 4096 * 2 / 2**30 + 0.47)


def test_replicas_that_exchange_states():
    assert [partners(24, 5), partners(5, 24), partners(32, 4), partners(4, 32)] == [5, 24, 1, 8]
    assert list(compared_processes(8)) == [1, 2, 3, 4, 5, 6, 7]
    assert list(compared_processes(64)) == [8, 16, 24, 32, 40, 48, 56]


def test_a_plan_lists_the_best_split_with_its_flags():
    argv = (SPREAD, "--global-batch-size", 256, "--seq-length", 4096, "--expert-model-parallel-size", 8)
    pair = forecast_of(config(*BASE, *argv, *PP2), 64, *_shapes("235B"))
    exact, rounded = [one for one in describe_places(pair, 76) if " teacher processes" in one]
    assert exact.startswith("  32 student + 32 teacher processes (pipeline 8, 4 replicas): 3965 ms, 56.")
    assert rounded.startswith("  32 student + 32 teacher processes, fp8 (pipeline 4, 8 replicas): 3965 ms")
    assert "; with --teacher-precision fp8 --teacher-processes 32 --teacher-pipeline-model-par" in rounded
    dense = forecast_of(config(*BASE, SPREAD, "--global-batch-size", 120), 8, *_shapes("8B"))
    lines = [one for one in describe_places(dense, 76) if " teacher processes" in one]
    assert [", fp8 (" in one for one in lines] == [False, True] and not any("; with" in one for one in lines)


def _shapes(pair: str):
    student, teacher = PAIRS[pair]
    return student, (teacher,)


def test_a_plan_of_a_run_has_both_sides():
    """The step is that of the slower one, and notes say what the split loses."""
    argv = ("--global-batch-size", 120, "--teacher-processes", 2)
    found = Forecast.from_facts(
        facts_of(config(*BASE, *argv), 6, STUDENT, heads=(TEACHER,))  # the student's side
    )
    (side,) = found.sides
    assert found.planned_step_ms() == side.step_ms(120) > 2 * found.student_step_ms()
    assert found.num_gpus == 8 and found.teacher_share() == pytest.approx(0.59, abs=0.01)
    (line,) = describe_sides(found, 20.0)
    assert "teacher: 2 processes of its own (2 replicas), asked 2 micro-batches ahead: " in line
    assert "GiB, does not fit; the student's side takes" in line
    notes = [one for one in plan_notes(found) if "one side waits" in one]
    assert len(notes) == 1 and "compares others" in notes[0]
    wide = Forecast.from_facts(
        facts_of(
            config(*BASE, "--global-batch-size", 120, "--teacher-processes", 12),
            12,
            STUDENT,
            heads=(TEACHER,),
        )
    )
    assert any("share a machine of 8" in one for one in plan_notes(wide))
    assert not any("while the student samples" in one for one in plan_notes(wide))


def test_a_plan_says_that_the_teacher_waits_for_completions():
    argv = ("--global-batch-size", 120, "--teacher-processes", 2, "--on-policy-fraction", 1, "--kd-ratio", 1)
    here = ("--prompt-data-path", "p", "--max-new-tokens", 64)
    for text, expected in ((here, 1), (("--rollout-source", "records", "--rollout-records", "r"), 0)):
        given = config(*BASE[:2], *BASE[4:6], *argv, *text)
        found = Forecast.from_facts(facts_of(given, 6, STUDENT, heads=(TEACHER,)))
        assert sum("while the student samples" in one for one in plan_notes(found)) == expected
