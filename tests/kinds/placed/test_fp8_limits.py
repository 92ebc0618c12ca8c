"""Check which teachers, packs and layouts are refused for FP8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.config.load import load_config
from mkd.data.aligned import teacher_pieces
from mkd.families.layer_shape import MLAShape
from mkd.kinds.placed import fp8
from tests.plan.shapes import MOE_TEACHER, QWEN3_5_9B, TEACHER
from tests.reported import reports
from tests.run_facts import problems_of, problems_of_one

BASE = "--student-hf s --teacher-hf t --data-path d --train-iters 1 --lr 1 --global-batch-size 8"
FP8 = "--teacher-precision fp8 --bf16"
BLOCKS = "--teacher-fp8-recipe blockwise --tensor-model-parallel-size 2 --sequence-parallel"


def config(*argv: str):
    return load_config(f"{BASE} {' '.join(argv)}".split()).config


def codes(settings, teacher=None, world_size: int = 8) -> list[str]:
    return reports(problems_of(settings, world_size, None, [teacher]))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (FP8, []),
        (f"{FP8} --teacher-fp8-recipe blockwise --teacher-residency host", []),
        (f"{FP8} --teacher-residency peers --teacher-peers 2", []),
        ("--teacher-precision fp8", ["add-flag: precision fp8 without --bf16"]),
        ("--teacher-fp8-recipe blockwise", ["remove-flag: no effect"]),
        (f"{FP8} --teacher-topk k", ["remove-flag: no effect"]),
        ("--teacher-fp8-recipe blockwise --teacher-topk k", ["remove-flag: fp8-recipe"]),
        (f"{FP8} --kd-ratio 0 --seq-length 12", []),
        (f"{FP8} --seq-length 12", ["length-not-divisible: is not a multiple of"]),
        (f"{FP8} --seq-length 12 --micro-batch-size 2 --global-batch-size 16", []),
        (f"{FP8} --seq-length 40 --context-parallel-size 2", ["length-not-divisible: is not a multiple of"]),
        (f"{FP8} --seq-length 48 --context-parallel-size 2", []),
        (f"{FP8} --seq-length 40 --tensor-model-parallel-size 2", []),
        (
            f"{FP8} --seq-length 40 --tensor-model-parallel-size 2 --sequence-parallel",
            ["length-not-divisible: is not a multiple of"],
        ),
        (f"{FP8} --seq-length 12 --xtoken-seq-length 64", []),
        (f"{FP8} --seq-length 12 --xtoken-seq-length 20", ["length-not-divisible: is not a multiple of"]),
        (f"{FP8} --seq-length 12 --xtoken-loss gold", []),
        (f"{FP8} {BLOCKS} --seq-length 128", ["length-not-divisible: is not a multiple of"]),
        (f"{FP8} {BLOCKS} --seq-length 256", []),
        (
            f"{FP8} {BLOCKS} --seq-length 256 --xtoken-loss gold",
            ["length-not-divisible: is not a multiple of"],
        ),
        (f"{FP8} {BLOCKS} --seq-length 256 --xtoken-loss gold --xtoken-seq-length 256", []),
    ],
)
def test_settings(argv, expected):
    assert codes(config(argv)) == expected


def test_the_advice_fits():
    settings = config(FP8, "--seq-length 36 --micro-batch-size 2 --context-parallel-size 2")
    (error,) = problems_of(settings, 8)
    assert error.do == "use --seq-length 40" and codes(config(FP8, error.do.removeprefix("use "))) == []


def test_models():
    """Refused are latent attention, mixers, and widths that are no multiples of 16 on a process.

    Of a model with experts only their widths count: nothing else is in FP8.
    """
    fp8, tensor = config(FP8), config(FP8, "--tensor-model-parallel-size 2 --teacher-fp8-recipe blockwise")
    assert codes(fp8, TEACHER) == codes(config("--bf16"), MOE_TEACHER) == []
    assert codes(fp8, MOE_TEACHER) == codes(config(FP8, "--seq-length 12"), MOE_TEACHER) == []
    narrow_experts = replace(MOE_TEACHER.layers[0], moe=replace(MOE_TEACHER.moe, ffn_hidden_size=24))
    narrow_experts = replace(MOE_TEACHER, layers=(narrow_experts,) * MOE_TEACHER.num_layers)
    assert codes(fp8, narrow_experts) == ["fp8-not-possible: but experts of the teacher have 24 channels"]
    layers = tuple(replace(layer, ffn_hidden_size=24) for layer in TEACHER.layers)
    narrow = replace(TEACHER, layers=layers)
    assert (
        codes(fp8, narrow) == codes(tensor, narrow) == ["fp8-not-possible: but weights of the teacher have"]
    )
    blocks, odd = config(FP8, BLOCKS, "--seq-length 256"), replace(TEACHER, hidden_size=4096 + 16)
    assert codes(blocks, TEACHER) == codes(tensor, odd) == []
    assert codes(blocks, odd) == ["fp8-not-possible: with blockwise scales and sequence"]
    latent = replace(TEACHER.layers[0], mla=MLAShape(512, 128, 64, 128))
    assert codes(fp8, replace(TEACHER, layers=(latent,) * 36)) == [
        "fp8-not-possible: but the teacher has latent"
    ]
    assert codes(fp8, QWEN3_5_9B) == [
        "fp8-not-possible: but not all layers of the teacher have attention and an MLP"
    ]


def test_the_length_of_packs_that_follows_from_the_data():
    assert fp8.LENGTH_UNIT == teacher_pieces.LENGTH_UNIT


def test_a_teacher_that_runs_alone():
    for argv, expected in (("", []), ("--seq-length 12", ["length-not-divisible: is not a multiple of"])):
        problems = problems_of_one(config(FP8, argv), 8, TEACHER, 0)
        assert reports(problems) == expected
    assert problems_of_one(config(FP8), 8, MOE_TEACHER, 0) == []
    assert problems_of_one(config(FP8, "--seq-length 12"), 8, None) == []


BLOCKS_OF_128 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        (BLOCKS_OF_128, []),
        ({"quant_method": "mxfp4"}, []),
        (None, ["fp8-not-possible: neither FP8 with blocks of weights nor MXFP4"]),
        ({"quant_method": "gptq"}, ["fp8-not-possible: neither FP8 with blocks of weights nor MXFP4"]),
        ({"quant_method": "fp8"}, ["fp8-not-possible: its scales are of blocks of None, not of 128 x 128"]),
        (BLOCKS_OF_128 | {"weight_block_size": [64, 128]}, ["fp8-not-possible: its scales are of blocks of"]),
    ],
)
def test_experts_that_stay_as_they_are_stored(quantisation, expected):
    stored = replace(MOE_TEACHER, hf_config={"quantization_config": quantisation})
    assert codes(config("--teacher-precision stored --bf16"), stored) == expected
    assert codes(config("--teacher-precision stored"), stored) == expected


def test_other_models_that_have_nothing_stored():
    stored, given = config("--teacher-precision stored"), {"quantization_config": BLOCKS_OF_128}
    assert codes(stored, replace(TEACHER, hf_config=given)) == ["fp8-not-possible: the teacher has none"]
    shape = replace(MOE_TEACHER, hf_config=given)
    argv = f"{BASE} --teacher-precision stored".replace("--teacher-hf t", "--teacher-load t")
    from_megatron = load_config(argv.split()).config
    assert codes(from_megatron, shape) == ["fp8-not-possible: Megatron checkpoints have unquantised weights"]
    narrow = replace(shape.layers[0], moe=replace(shape.moe, ffn_hidden_size=64))
    assert codes(stored, replace(shape, layers=(narrow,) * shape.num_layers)) == [
        "fp8-not-possible: a block of gates, of which an expert has 64"
    ]
