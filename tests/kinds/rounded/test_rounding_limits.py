"""Check which students, layouts and patterns are refused for rounding, and what the errors propose."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.kinds.rounded.rounded_student import RoundedStudent
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import MOE_TEACHER, QWEN3_5_9B, STUDENT
from tests.reported import reports
from tests.run_facts import problems_of

BASE = (
    "--student-hf s --teacher-hf student-initial --data-path d --train-iters 1 --lr 1 --global-batch-size 8"
)
INT4, ACTIVATIONS = "--bf16 --student-rounding int4", "--round-activations"
QWEN2_5 = ModelShape.from_hf_config(  # Qwen2.5-0.5B
    dict(
        model_type="qwen2",
        num_hidden_layers=2,
        hidden_size=896,
        intermediate_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
)
SMOLLM2 = ModelShape.from_hf_config(
    dict(
        model_type="llama",
        num_hidden_layers=2,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
)


def config(argv: str):
    return load_config(f"{BASE} {argv}".split()).config


def codes(argv: str, student=STUDENT) -> list[str]:
    return reports(problems_of(config(argv), 8, student, [student]))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (INT4, []),
        (f"{INT4} --tensor-model-parallel-size 8", []),
        (f"{INT4} --rounding-exclude *.layers.0.* *.down_proj", []),
        (f"--bf16 --student-rounding nvfp4 {ACTIVATIONS}", []),
        ("--bf16 --student-rounding fp8-block --tensor-model-parallel-size 8", []),
        ("--student-rounding int4", ["add-flag: --bf16"]),
        (
            f"{INT4} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            ["exclude-each-other: --overlap-param-gather"],
        ),
        (f"{INT4} --lora-rank 4", ["exclude-each-other: with --lora-rank"]),
        (f"{INT4} --rounding-group 48", ["value-unknown: use 128, 64, 32"]),
        ("--bf16 --student-rounding int8 --rounding-group 128", ["value-unknown: each row has one scale"]),
        (f"{INT4} {ACTIVATIONS}", ["exclude-each-other: use int8, fp8, nvfp4"]),
        (f"{INT4} --rounding-exclude *.lm_head", ["value-unknown: matches no matrix"]),
        (f"{INT4} --rounding-exclude *.k_proj", ["value-not-valid: q_proj, k_proj, v_proj of layer 0"]),
        ("--rounding-group 64", ["remove-flag: --rounding-group"]),
        (ACTIVATIONS, ["remove-flag: --round-activations"]),
        (f"{INT4} --calibration-batches 0", ["out-of-range: calibration-batches"]),
    ],
)
def test_problems_of_settings(argv, expected):
    assert codes(argv) == expected


@pytest.mark.parametrize(
    ("student", "argv", "expected"),
    [
        (QWEN2_5, INT4, []),
        (  # 7 of the 14 heads are 3.5 x 128 channels
            QWEN2_5,
            f"{INT4} --tensor-model-parallel-size 2",
            ["model-not-divisible: use --rounding-group 64 or --tensor-model-parallel-size 1"],
        ),
        (QWEN2_5, f"{INT4} --tensor-model-parallel-size 2 --rounding-group 64", []),
        (SMOLLM2, INT4, ["model-not-divisible: use --rounding-group 64"]),
        (SMOLLM2, f"{INT4} --rounding-group 64", []),
        (SMOLLM2, "--bf16 --student-rounding fp8-block", ["model-not-divisible: '*.q_proj'"]),
        (
            MOE_TEACHER,
            f"{INT4} {ACTIVATIONS}".replace("int4", "int8"),
            ["model-feature-not-supported: experts"],
        ),
        (MOE_TEACHER, INT4, []),
        (QWEN3_5_9B, f"{INT4} {ACTIVATIONS}".replace("int4", "fp8"), ["model-feature-not-supported: mixers"]),
    ],
)
def test_problems_of_shapes(student, argv, expected):
    found = RoundedStudent().problems(facts(argv, student))
    assert reports(found) == expected


def facts(argv: str, student):
    from tests.run_facts import facts_of

    return facts_of(config(argv), 8, student, [student])


def test_the_initial_student_is_a_teacher():
    found = config("--teacher-residency host")
    assert (found.teachers[0].hf, found.teachers[0].residency) == ("s", "host")
    loaded = config("--student-load c").teachers[0]
    assert (loaded.hf, loaded.load) == ("s", "c")
