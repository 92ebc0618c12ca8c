"""Check settings of LoRA students, their card, and a plan for one GPU of 24 GiB."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.config.load import load_config
from mkd.kinds.lora import lora_students
from mkd.kinds.loss_card import loss_card
from mkd.plan.advice.verdict import describe
from mkd.plan.models.lora_shape import LoRAShape
from tests.plan.shapes import STUDENT, TEACHER, config, qwen3, qwen3_moe
from tests.run_facts import facts_of, forecast_of, problems_of

FOUR_B = qwen3(36, 2560, 9728, 32, tied=True)
GIVEN = "--student-hf", "s", "--teacher-hf", "t", "--data-path", "d", "--train-iters", "1"
FULL = "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"


def codes(*flags: str, student=STUDENT) -> list[str]:
    return [one.code for one in problems_of(config(*GIVEN, *flags), 1, student, [TEACHER])]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--lora-rank", "0"), "out-of-range"),
        (("--lora-rank", "2049"), "out-of-range"),  # above the width of the student
        (("--lora-rank", "8", "--lora-targets", "qkv", "head"), "value-unknown"),
        (("--lora-rank", "8", "--student-train-parts", "text"), "exclude-each-other"),
        (("--lora-rank", "8", "--moe-router-bias-update-rate", "0.001"), "exclude-each-other"),
        (("--lora-alpha", "8"), "remove-flag"),
        (("--export-lora", "out"), "remove-flag"),
        (("--lora-rank", "8", "--teacher-residency", "student"), "value-not-valid"),
        (("--lora-rank", "8", "--lora-base", "nf4", "--student-load", "c"), "exclude-each-other"),
        (("--lora-rank", "8", "--export-lora", "out", "--student-load", "c"), "exclude-each-other"),
        (("--lora-base", "nf4"), "remove-flag"),
    ],
)
def test_what_is_refused(flags, code):
    assert code in codes(*flags)


def test_rows_of_whole_blocks_alone_are_rounded(monkeypatch):
    """The layout must not change a scale; without the package nothing can be rounded."""
    narrow, given = qwen3(2, 2048, 6176, 16, tied=True), ("--lora-rank", "8", "--lora-base", "nf4")
    monkeypatch.setattr(lora_students, "find_spec", lambda name: name)
    assert codes(*given) == [] and codes(*given, student=narrow) == ["value-not-valid"]
    assert codes(*given, "--lora-targets", "qkv", student=narrow) == []
    monkeypatch.setattr(lora_students, "find_spec", lambda name: None)
    assert codes(*given) == ["package-missing"]


def test_a_target_without_layers_is_refused():
    routed = qwen3_moe(2, 2048, 768, 32)
    flags = "--lora-rank", "8", "--lora-targets", "qkv", "fc1"
    found = problems_of(config(*GIVEN, *flags), 1, routed, [TEACHER])
    assert [one.code for one in found] == ["value-not-valid"] and "fc1 match no layer" in str(found[0])
    alone = "--lora-rank", "8", "--teacher-hf", "t"  # the default means the targets that there are
    assert problems_of(config(*GIVEN, *alone), 1, routed, [TEACHER]) == []


def test_a_stage_without_adapters_is_refused():
    mixed = qwen3_moe(4, 2048, 768, 32, mlp_only_layers=[1])
    pipeline = "--pipeline-model-parallel-size", "2", "--lora-rank", "8", "--lora-targets", "fc1"
    found = problems_of(config(*GIVEN, *pipeline), 2, mixed, [TEACHER])
    assert [one.code for one in found] == ["layout-not-valid"] and "stage 1" in str(found[0])
    assert problems_of(config(*GIVEN, *pipeline, "qkv"), 2, mixed, [TEACHER]) == []


def test_parameters_of_adapters():
    """By hand: R (in + out) of each linear layer."""
    of_layer = (2560 + 6144) + (4096 + 2560) + (2560 + 2 * 9728) + (9728 + 2560)
    lora = LoRAShape(16, 32.0, ("qkv", "proj", "fc1", "fc2"))
    assert lora.parameters(FOUR_B, FOUR_B.layers) == 36 * 16 * of_layer
    only = replace(lora, targets=("fc2",))
    assert only.parameters(FOUR_B, FOUR_B.layers, tensor=2) == 36 * 16 * (9728 // 2 + 2560)


def test_a_gpu_of_24_gib_takes_4b_from_8b(monkeypatch):
    monkeypatch.setattr(lora_students, "find_spec", lambda name: name)  # a plan for another machine
    flags = *GIVEN, "--seq-length", "4096", "--bf16", "--device-memory-gib", "24"
    fits = config(*flags, *FULL, "--lora-rank", "16", "--teacher-residency", "host")
    forecast = forecast_of(fits, 1, FOUR_B, [TEACHER])
    assert forecast.memory.ranks[0].optimizer_gib == pytest.approx(36 * 16 * 49_724 * 12 / 2**30, rel=0.1)
    assert "memory: fits" in describe(forecast)
    whole, rounded = (replace(fits, lora=replace(fits.lora, lora_base=base)) for base in ("bf16", "nf4"))
    whole, rounded = (forecast_of(one, 1, FOUR_B, [TEACHER]).memory.ranks[0] for one in (whole, rounded))
    in_4_bits = LoRAShape.of(fits).weights(FOUR_B, FOUR_B.layers)
    assert whole.student_gib - rounded.student_gib == pytest.approx(in_4_bits * (2 - 0.5625) / 2**30)
    without = describe(forecast_of(config(*flags), 1, FOUR_B, [TEACHER]))
    assert "does not fit" in without and "1. --lora-rank 16 --recompute" in without


def test_the_base_as_teacher_takes_no_memory():
    flags = "--student-hf", "s", "--data-path", "d", "--train-iters", "1", "--bf16", "--lora-rank", "16"
    shared = config(*flags, "--teacher-hf", "student-base")
    assert shared.teachers[0].hf == "s" and shared.teachers[0].residency == "student"
    assert forecast_of(shared, 1, STUDENT, [STUDENT]).memory.ranks[0].teacher_gib == 0
    reference = load_config([*flags, "--dpo-beta", "0.1", "--kd-ratio", "0"]).config
    assert reference.teachers[0].residency == "student"
    # On its pipeline stages are the same layers as of the student.
    two, uneven = ("--pipeline-model-parallel-size", "2"), f"1,{STUDENT.num_layers - 1}"
    for given in (("--pipeline-layout", "auto"), ("--student-pipeline-layout", uneven)):
        shared = config(*flags, "--teacher-hf", "student-base", *two, *given)
        student, (teacher,) = facts_of(shared, 2, STUDENT, [STUDENT]).layouts
        assert teacher == student and shared.teachers[0].residency == "student"
    own = config(*flags, "--teacher-hf", "s", *two, "--teacher-pipeline-layout", uneven)
    assert own.teachers[0].residency == "device"
    alone = config("--student-hf", "s", "--teacher-hf", "student-base")
    assert (alone.teachers[0].hf, alone.teachers[0].residency) == ("s", "device")


def test_the_card_names_the_adapters():
    card = loss_card(config(*GIVEN, "--lora-rank", "8", "--lora-targets", "qkv"), STUDENT, [TEACHER])
    assert "y = W x + 2 B A x of rank 8, on qkv; all other weights are frozen" in card
