"""Check what a teacher that averages the student's weights refuses, and how plan and loss card show it."""

from __future__ import annotations

import json

import pytest

from mkd.config.load import load_config
from mkd.errors import ErrorList
from mkd.kinds.loss_card import loss_card
from mkd.plan.models.parameters import model_parameters, saved_bytes
from tests.plan.checks.test_problems import BASE, shape
from tests.reported import reports
from tests.run_facts import forecast_of, problems_of


def averaged(tmp_path, *flags, **teacher):
    path = tmp_path / "ema.yaml"
    given = {key: value for key, value in ({"weights": "ema"} | teacher).items() if value is not None}
    path.write_text(json.dumps({"teachers": [given]}))
    return load_config([*BASE[:2], *BASE[4:], "--config", str(path), *flags]).config


def problems(config, student=None):
    student = student or shape()
    return reports(problems_of(config, 1, student, [student]))


def test_it_is_the_students_model_with_or_without_a_context(tmp_path):
    for context in (None, {}):
        config = averaged(tmp_path, context=context, ema={"rate": 0.2})
        (teacher,) = config.teachers
        assert problems(config) == [] and (teacher.hf, teacher.name) == ("s", "student-ema")
        assert (teacher.ema.rate, teacher.ema.every, config.parallel.teacher_prefetch) == (0.2, 1, "0")
    student_layout = averaged(tmp_path, "--student-pipeline-layout", "8")
    assert student_layout.teachers[0].pipeline_layout == "8" and problems(student_layout) == []
    adapters = averaged(tmp_path, "--lora-rank", "2", hf="s")
    assert adapters.teachers[0].residency == "student" and problems(adapters) == []


@pytest.mark.parametrize(
    "flags, teacher",
    [
        ((), {"hf": "t"}),
        ((), {"topk": "t"}),
        ((), {"xtoken": {}}),
        ((), {"residency": "host"}),
        ((), {"residency": "student"}),
        ((), {"precision": "fp8"}),
        ((), {"pipeline_layout": "8"}),
        ((), {"expert_model_parallel_size": 2}),
        (("--teacher-prefetch", "2"), {}),
        (("--student-precision", "fp8", "--bf16"), {}),
        (("--student-rounding", "int8", "--bf16"), {}),
        (("--lora-rank", "2", "--lora-base", "nf4", "--bf16"), {}),
        (("--lora-rank", "2"), {"residency": "host"}),
        (("--moe-router-bias-update-rate", "0.001"), {}),
    ],
)
def test_what_it_cannot_have(flags, teacher, tmp_path):
    found = problems(averaged(tmp_path, *flags, **teacher))
    assert found.count("value-not-valid: weights ema is not possible") == 1, found


@pytest.mark.parametrize(
    "teacher, code",
    [
        ({"ema": {"rate": 0}}, "out-of-range"),
        ({"ema": {"rate": 1.5}}, "out-of-range"),
        ({"ema": {"every": 0}}, "out-of-range"),
        ({"weights": None, "hf": "t", "ema": {}}, "remove-flag"),
    ],
)
def test_settings_that_are_not_valid(teacher, code, tmp_path):
    assert [one.partition(":")[0] for one in problems(averaged(tmp_path, **teacher))] == [code]


def test_the_shorthand_is_the_first_teacher(tmp_path):
    student = BASE[:2] + BASE[4:]
    initial, live, ema = (
        load_config([*student, "--self-teacher", value]) for value in ("initial", "live", "ema")
    )
    assert (initial.config.teachers[0].hf, initial.config.teachers[0].weights) == ("s", "frozen")
    assert live.config.teachers[0].weights == "live" and ema.config == averaged(tmp_path)
    assert ema.origins["teachers[0].weights"] == "--self-teacher" and ema.config.self_teacher is None
    path = tmp_path / "context.yaml"
    path.write_text(json.dumps({"self_teacher": "live", "teachers": [{"context": {}}]}))
    assert problems(load_config([*student, "--config", str(path)]).config) == []
    path.write_text(json.dumps({"teachers": [{"hf": "other", "weights": "frozen", "context": {}}]}))
    flags = ("--config", str(path), "--self-teacher", "ema")  # the command line wins over a file
    assert problems(load_config([*student, *flags]).config) == []
    with pytest.raises(ErrorList) as refused:
        load_config([*student, "--self-teacher", "initial", "--teacher-hf", "t"])
    assert [one.code for one in refused.value.errors] == ["exclude-each-other"]


@pytest.mark.parametrize("bf16, spread", [(True, True), (True, False), (False, True)])
def test_plan_and_disk_count_weights_and_average(bf16, spread, tmp_path):
    flags = ["--bf16"] * bf16 + ["--use-distributed-optimizer"] * spread + ["--global-batch-size", "8"]
    config = averaged(tmp_path, *flags)
    frozen = load_config([*BASE, *flags]).config
    student, count = shape(), model_parameters(shape()).total
    need, usual = (forecast_of(one, 8, student, [student]) for one in (config, frozen))
    more = (need.need_gib(0) - usual.need_gib(0)) * 2**30 / count
    assert more == pytest.approx((4 / 8 if spread else 4) if bf16 else 0, abs=0.15)  # the head is padded
    assert need.optimizer_ms > usual.optimizer_ms
    assert saved_bytes(config, student) - saved_bytes(frozen, student) == 4 * count


def test_the_loss_card_says_how_the_teacher_moves(tmp_path):
    card = loss_card(averaged(tmp_path, ema={"rate": 0.05, "every": 2}), shape(), [shape()])
    assert "q <- 0.95 q + 0.05 x the student's after every 2 updates" in card
    assert "nothing: their teachers are frozen" in card
