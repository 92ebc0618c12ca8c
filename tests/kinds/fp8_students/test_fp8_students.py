"""Check which students, packs and ways of training are refused for FP8, and what a plan counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.config.load import load_config
from mkd.families.layer_shape import MLAShape
from mkd.kinds.fp8_students.fp8_students import Fp8Students
from mkd.kinds.known_kinds import identity
from mkd.plan.footprint.memory import predict_memory
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import MOE_STUDENT, QWEN3_5_9B, STUDENT, TEACHER
from tests.reported import reports
from tests.run_facts import facts_of, forecast_of, problems_of

BASE = "--student-hf s --teacher-hf t --data-path d --train-iters 1 --lr 1 --global-batch-size 8"
FP8 = "--student-precision fp8 --student-fp8-recipe tensorwise --bf16"
BLOCKS = "--student-fp8-recipe blockwise --tensor-model-parallel-size 2 --sequence-parallel"
GIB = 2**30


def config(*argv: str):
    return load_config(f"{BASE} {' '.join(argv)}".split()).config


def codes(settings, student=None, world_size: int = 8) -> list[str]:
    return reports(problems_of(settings, world_size, student, [TEACHER]))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (FP8, []),
        ("--student-precision fp8 --bf16 --teacher-precision fp8", []),
        (f"{FP8} --recompute-granularity selective --use-distributed-optimizer", []),
        ("--student-precision fp8", ["add-flag: --student-precision fp8 without --bf16"]),
        ("--student-fp8-recipe tensorwise", ["remove-flag: no effect"]),
        (f"{FP8} --seq-length 24", ["length-not-divisible: is not a multiple of 16"]),
        (f"{FP8} --seq-length 24 --micro-batch-size 2 --global-batch-size 16", []),
        (f"{FP8} --seq-length 40 --context-parallel-size 2", ["length-not-divisible: use --seq-length 64"]),
        (f"{FP8} --seq-length 48 --tensor-model-parallel-size 2", []),
        (f"{FP8} {BLOCKS} --seq-length 128", ["length-not-divisible: use --seq-length 256"]),
        (f"{FP8} {BLOCKS} --seq-length 256", []),
        (f"{FP8} --lora-rank 4", ["exclude-each-other: with --lora-rank"]),
        (f"{FP8} --student-rounding int8", ["exclude-each-other: with --student-rounding"]),
        (f"{FP8} --simpo-beta 2 --kd-ratio 0", ["exclude-each-other: with preference pairs"]),
        (f"{FP8} --kd-ratio 0", []),
    ],
)
def test_settings(argv, expected):
    assert codes(config(argv)) == expected


def test_models():
    """Refused are experts, latent attention, mixers, and widths that are no multiples of 16 on a process."""
    fp8 = config(FP8)
    assert codes(fp8, STUDENT) == []
    assert codes(fp8, MOE_STUDENT) == ["fp8-not-possible: but the student has experts"]
    assert codes(fp8, QWEN3_5_9B) == [
        "fp8-not-possible: but not all layers of the student have attention and an MLP"
    ]
    latent = replace(STUDENT.layers[0], mla=MLAShape(512, 128, 64, 128))
    latent = replace(STUDENT, layers=(latent,) * STUDENT.num_layers)
    assert codes(fp8, latent) == ["fp8-not-possible: but the student has latent"]
    layers = tuple(replace(layer, ffn_hidden_size=24) for layer in STUDENT.layers)
    (narrow,) = problems_of(fp8, 8, replace(STUDENT, layers=layers), [TEACHER])
    assert "weights of the student have 24 channels" in narrow.what and narrow.do.startswith(
        "remove --student"
    )
    odd = replace(STUDENT, hidden_size=STUDENT.hidden_size + 16)
    (blocks,) = problems_of(config(FP8, BLOCKS, "--seq-length 256"), 8, odd, [TEACHER])
    assert blocks.do == "use --student-fp8-recipe tensorwise"


def test_this_machine_has_no_gpu():
    (error,) = Fp8Students().device_problems(facts_of(config(FP8)))
    assert "--student-precision fp8 needs a GPU" in error.what and error.do == "use --student-precision bf16"
    assert not list(Fp8Students().device_problems(facts_of(config("--bf16"))))


def test_a_resumed_run_keeps_its_precision():
    assert identity(config(FP8))["student.precision"] == "fp8 tensorwise"
    assert "student.precision" not in identity(config("--bf16"))


SIX_LAYERS = ModelShape.from_hf_config(  # of Qwen3-8B's shape
    dict(
        model_type="qwen3",
        num_hidden_layers=6,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
)


def forecast(*more: str):
    """Return the plan of the step that was measured."""
    settings = config("--kd-ratio 0 --bf16 --seq-length 8192 --global-batch-size 4", *more)
    return forecast_of(settings, 1, SIX_LAYERS)


@pytest.mark.parametrize(
    ("recipe", "step", "peak_gib"), [("tensorwise", 0.825, 51.03), ("blockwise", 0.874, 51.07)]
)
def test_a_plan_has_the_measured_time_and_memory(recipe, step, peak_gib):
    bf16, fp8 = forecast(), forecast(FP8, f"--student-fp8-recipe {recipe}")
    assert fp8.planned_step_ms() / bf16.planned_step_ms() == pytest.approx(step, abs=0.002)
    before, after = (predict_memory(one.facts).ranks[0] for one in (bf16, fp8))
    assert after.allocated_gib == pytest.approx(peak_gib / 1.0065, abs=0.03)
    of_layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) * 2
    inputs = 8192 * (2 * 4096 + 12288) * 2  # bf16; FP8 has half of it, and attention's output besides
    scales = 1 + (recipe == "blockwise") * 4 / 128
    more = of_layer - inputs + (inputs / 2 + 8192 * 4096) * scales
    assert after.activations_gib - before.activations_gib == pytest.approx(6 * more / GIB)


def test_full_recomputation_keeps_the_rounded_weights_of_one_layer():
    flags = (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    )
    before, after = (
        predict_memory(forecast(*flags, *more).facts).ranks[0]
        for more in ((), ("--student-precision", "fp8"))
    )
    assert after.activations_gib == before.activations_gib
    assert 0.2 < after.transient_gib - before.transient_gib < 0.4


def test_narrow_students_are_planned_to_be_slower():
    narrow = replace(SIX_LAYERS, hidden_size=2048)
    settings = (config("--bf16", more) for more in ("", FP8))
    bf16, fp8 = (forecast_of(one, 8, narrow, [TEACHER]).planned_step_ms() for one in settings)
    assert fp8 > bf16
