"""Check the refusals of settings of experts."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.errors import UsageError
from mkd.plan.checks.expert_limits import check_expert_settings, check_experts, require_expert_layers
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import model_sizes
from tests.plan.shapes import STUDENT as DENSE
from tests.reported import Reported, reports
from tests.run_facts import facts_of

COMMON = dict(
    num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=300
)


def moe(num_experts: int = 8) -> ModelShape:
    return ModelShape.from_hf_config(dict(model_type="qwen3_moe", num_experts=num_experts, **COMMON))


def codes(*argv, world_size=8, student=None, teacher=None):
    config = load_config(["--student-hf", "s", "--teacher-hf", "t", *map(str, argv)]).config
    facts = facts_of(config, world_size, student or moe(), [teacher or moe(12)])
    found = [*check_expert_settings(facts), *check_experts(facts)]
    return reports(found)


EP, TEACHER_EP = "--expert-model-parallel-size", "--teacher-expert-model-parallel-size"
TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"
SELECTIVE = ("--recompute-granularity", "selective")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), []),
        ((EP, 4), []),
        ((EP, 8, TEACHER_EP, 4), []),
        ((EP, 8), ["model-not-divisible: experts are not divisible by"]),  # the teacher's 12
        ((EP, 3, TEACHER_EP, 1), ["model-not-divisible: experts are not divisible by"]),
        ((EP, 4, TEACHER_EP, 6), ["world-not-divisible: processes of a pipeline stage are"]),
        ((EP, 8, PP, 2, TEACHER_EP, 4), ["world-not-divisible: processes of a pipeline stage are"]),
        ((TP, 2), ["add-flag: has experts, and"] * 2),
        ((TP, 2, SP), []),
        (("--expert-tensor-parallel-size", 2), ["remove-flag: expert-tensor-parallel-size"]),
        (("--recompute-modules", "mlp", *SELECTIVE), ["value-unknown: is not a known value"]),
        (("--recompute-modules", "moe"), ["remove-flag: no effect"]),
        (("--recompute-modules", "moe", "core_attn", *SELECTIVE), []),
        (("--moe-aux-loss-coeff", 0.1, "--moe-z-loss-coeff", 0.1), []),
        (("--moe-router-bias-update-rate", 0.1), ["remove-flag: no effect"]),
    ],
)
def test_models_with_experts(argv, expected):
    assert codes(*argv) == expected


def problems_of(*argv, student, world_size=8):
    config = load_config(["--student-hf", "s", "--teacher-hf", "t", *map(str, argv)]).config
    return list(check_experts(facts_of(config, world_size, student, [moe(12)])))


def test_a_flag_that_the_teacher_inherits_is_named_as_it_was_given():
    (of_teacher,) = problems_of(EP, 8, student=moe())
    assert of_teacher.what == "the teacher's 12 experts are not divisible by expert-model-parallel-size 8"
    assert of_teacher.do == f"use {EP} 1 or 2 or 4, or give the teacher its own: {TEACHER_EP} 1 or 2 or 4"
    (of_both,) = problems_of(EP, 4, student=moe(), world_size=6)
    assert of_both.code == "world-not-divisible" and f"use {EP} " in of_both.do
    _, of_teacher = problems_of(EP, 5, student=DENSE)
    assert (
        of_teacher.do == f"use {TEACHER_EP} 1 or 2 or 4"
        and " expert-model-parallel-size 5" in of_teacher.what
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), []),
        ((TEACHER_EP, 4), []),
        ((EP, 2), ["remove-flag: has no experts"]),
        (("--moe-z-loss-coeff", 0.1), ["remove-flag: no effect"]),
        (("--moe-router-bias-update-rate", 0.1), ["remove-flag: no effect"]),
        (("--recompute-modules", "moe", *SELECTIVE), ["remove-flag: no effect"]),
    ],
)
def test_a_dense_student(argv, expected):
    assert codes(*argv, student=DENSE) == expected


def test_a_correction_bias_of_the_student_may_move():
    rate, sizes = ("--moe-router-bias-update-rate", 0.001), COMMON | {"first_k_dense_replace": 1}
    student = ModelShape.from_hf_config(dict(model_type="deepseek_v3", **sizes))
    assert codes(*rate, student=student) == []
    assert codes(*rate, teacher=student) == ["remove-flag: no effect"]


def test_a_dense_teacher():
    assert codes(EP, 4, teacher=DENSE) == []
    assert codes(EP, 4, TEACHER_EP, 2, teacher=DENSE) == ["remove-flag: has no experts"]


def test_a_teacher_has_the_students_size_unless_it_has_its_own():
    config = load_config(["--teacher-hf", "t", EP, "4"]).config
    assert model_sizes(config, moe(), 0).expert == 4 and model_sizes(config, DENSE, 0).expert == 1
    config = load_config(["--teacher-hf", "t", EP, "4", TEACHER_EP, "2"]).config
    assert (model_sizes(config, moe(), 0).expert, model_sizes(config, moe()).expert) == (2, 4)


@pytest.mark.parametrize(
    ("dense", "virtual_stages", "flags", "is_refused"),
    [
        ([0, 1], 1, ("--use-distributed-optimizer",), True),
        ([0, 1], 1, (), False),
        ([0], 1, ("--use-distributed-optimizer",), False),
        ([0, 2], 2, ("--use-distributed-optimizer",), True),  # rank 0 has layers 0 and 2
        ([0, 1], 2, ("--use-distributed-optimizer",), False),
    ],
)
def test_every_pipeline_rank_has_experts_to_optimise(dense, virtual_stages, flags, is_refused):
    """Megatron's distributed optimizer fails at the first save otherwise."""
    flags += PP, "2", "--num-virtual-stages-per-pipeline-rank", str(virtual_stages)
    config = load_config(["--student-hf", "s", "--teacher-hf", "t", *flags]).config
    shape = ModelShape.from_hf_config(
        dict(model_type="qwen3_moe", num_experts=8, mlp_only_layers=dense, **COMMON)
    )
    facts = facts_of(config, 2, shape)
    if not is_refused:
        return require_expert_layers(facts)
    with pytest.raises(UsageError) as caught:
        require_expert_layers(facts)
    assert Reported.of(caught.value) == "layout-not-valid: layers of the student, none of"
