from __future__ import annotations

import pytest

from mkd.config.schema import XTokenConfig
from mkd.plan.layout import PipelineLayout
from mkd.plan.times.layer_time import WorkTime
from tests.plan.shapes import SEQ_LENGTH, STUDENT, TEACHER, config, cost_of, equal_layers, several

TP2 = ("--tensor-model-parallel-size", 2)
FULL = ("--recompute-granularity", "full", "--recompute-method")


@pytest.mark.parametrize(
    ("document_length", "student_ms", "teacher_ms"),
    [
        # measured on one H200: packs of short documents, one long document
        (1024, 148.5, 200.2),
        (SEQ_LENGTH, 193.7, 235.5),
    ],
)
def test_bodies_take_what_was_measured(document_length, student_ms, teacher_ms):
    cost = cost_of(config(), STUDENT, (TEACHER,), 1, document_length)
    assert len(cost.student) == 28 and len(cost.teachers[0]) == 36
    assert sum(layer.total_ms for layer in cost.student) == pytest.approx(student_ms, rel=0.02)
    assert sum(layer.total_ms for layer in cost.teachers[0]) == pytest.approx(teacher_ms, rel=0.02)
    assert cost.head_ms == pytest.approx(41, rel=0.01)


def test_heads_are_forward_time_of_the_last_stage():
    cost = equal_layers(3, ((4, 10),), head_ms=100)
    times = cost.stage_times(PipelineLayout.parse("2,1", 3, 2), [PipelineLayout.parse("1,3", 4, 2)])
    assert times == [WorkTime(12, 4), WorkTime(131, 2)]
    assert times[1].total_ms == 133
    alone = equal_layers(3, (), head_ms=100)
    assert alone.stage_times(PipelineLayout.parse("2,1", 3, 2), []) == [WorkTime(2, 4), WorkTime(101, 2)]


def test_without_a_teacher_only_the_student_counts():
    alone, pair = cost_of(config(), STUDENT, (), 1), cost_of(config(), STUDENT, (TEACHER,), 1)
    assert alone.teachers == ()
    assert alone.student == pair.student
    assert alone.head_ms == pytest.approx(pair.head_ms * 3 * 2048 / (3 * 2048 + 4096))


@pytest.mark.parametrize("flags", [TP2, ("--context-parallel-size", 2)])
def test_processes_share_the_work(flags):
    one, two = cost_of(config(), STUDENT, (TEACHER,), 1), cost_of(config(*flags), STUDENT, (TEACHER,), 1)
    assert two.head_ms == pytest.approx(one.head_ms / 2)
    for whole, half in zip(one.models, two.models, strict=True):
        assert half[0].total_ms - half[0].collectives_ms == pytest.approx(whole[0].total_ms / 2)


def test_a_micro_batch_of_two_packs_takes_twice_as_long():
    one, two = (
        cost_of(config(), STUDENT, (TEACHER,), 1),
        cost_of(config("--micro-batch-size", 2), STUDENT, (TEACHER,), 1),
    )
    assert two.student[0].total_ms == pytest.approx(2 * one.student[0].total_ms)
    assert two.head_ms == pytest.approx(2 * one.head_ms)


@pytest.mark.parametrize(
    ("flags", "forwards"),  # forwards of the student in its backward
    [
        ((), 2),
        ((*FULL, "uniform", "--recompute-num-layers", 1), 3),
        ((*FULL, "block", "--recompute-num-layers", 2), 2 + 2 / 7),  # 2 of the 7 layers of each of 4 stages
        ((*FULL, "block", "--recompute-num-layers", 9), 3),
    ],
)
def test_recomputation_is_backward_time(flags, forwards):
    cost = cost_of(config(*flags), STUDENT, (TEACHER,), 4)
    assert cost.student[0].backward_ms == pytest.approx(forwards * cost.student[0].forward_ms)


def test_selective_recomputation_repeats_attention():
    plain, again = (
        cost_of(config(*flags), STUDENT, (TEACHER,), 1)
        for flags in ((), ("--recompute-granularity", "selective"))
    )
    attention_ms = 2 * 2048 * 8 * 1024**2 / 460e9  # 8 documents of 1024 tokens
    assert again.student[0].backward_ms - plain.student[0].backward_ms == pytest.approx(attention_ms)


def test_every_teacher_has_its_forward_and_its_layers():
    cost = cost_of(several({}, {}), STUDENT, (TEACHER, STUDENT), 2)
    both = tuple(cost_of(config(), STUDENT, (shape,), 2).teachers[0] for shape in (TEACHER, STUDENT))
    assert cost.teachers == both and both[0] != both[1]
    cost = equal_layers(3, ((4, 10), (4, 100)), head_ms=1000)
    layouts = [PipelineLayout.parse(text, 4, 2) for text in ("1,3", "4,0")]
    times = cost.stage_times(PipelineLayout.parse("2,1", 3, 2), layouts)
    assert times == [WorkTime(2 + 10 + 400, 4), WorkTime(1 + 30 + 1000, 2)]


def test_a_teacher_s_own_tokens_are_counted():
    """Packs and documents twice as long make attention four times as expensive."""
    xtoken = XTokenConfig(seq_length=2 * SEQ_LENGTH)
    short, long = (
        cost_of(several({}, {"xtoken": x}), STUDENT, (TEACHER, TEACHER), 1) for x in (XTokenConfig(), xtoken)
    )
    assert short.teachers[0] == short.teachers[1] == long.teachers[0]
    attention_ms = 2 * 4096 * 8 * 1024**2 / 460e9  # 8 documents of 1024 tokens
    products_ms = short.teachers[1][0].forward_ms - attention_ms
    assert long.teachers[1][0].forward_ms == pytest.approx(2 * products_ms + 4 * attention_ms)


@pytest.mark.parametrize(
    ("teachers", "kd", "of_student", "of_teachers"),
    [
        ([], {"kd_ratio": 0.0}, 1, 0),
        ([{}], {}, 1, 1),
        ([{}, {}], {}, 3, 2),  # cross entropy and two divergences
        ([{}, {}], {"kd_ratio": 1.0}, 2, 2),
        ([{}, {}], {"teacher_combination": "average"}, 1, 2),
        ([{}, {}], {"teacher_combination": "select"}, 3, 4),
        ([{}, {"xtoken": XTokenConfig()}], {"teacher_weighting": "ce"}, 3, 4),
        ([{"xtoken": XTokenConfig()}], {}, 2, 1),
        ([{"xtoken": XTokenConfig()}], {"kd_ratio": 1.0}, 1, 1),
    ],
)
def test_passes_over_the_heads(teachers, kd, of_student, of_teachers):
    cost = cost_of(several(*teachers, **kd), STUDENT, (TEACHER,) * len(teachers), 1)
    flops = 2 * SEQ_LENGTH * 151936 * (3 * 2048 * of_student + 4096 * of_teachers)
    assert cost.head_ms == pytest.approx(flops / 620e9)
