"""Check counts of parameters against files, published figures and models as they are built."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mkd.checkpoint.hf.hf_names import hf_tensor_shapes
from mkd.plan.models.flops import matmul_parameters
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import active_parameters, model_parameters, stage_parameters
from mkd.plan.parallel_sizes import ONE_PROCESS
from tests.plan.shapes import (
    DEEPSEEK_V3,
    MOE_STUDENT,
    MOE_TEACHER,
    SEQ_LENGTH,
    STUDENT,
    gpt_oss,
    student_activations,
)
from tests.tiny_models import FAMILIES, make_model


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5", "qwen3_next"])
def test_parameters_are_those_of_the_checkpoint(family, tmp_path):
    """Sum over the layers of two stages, embedding and head each on their stage."""
    shape = ModelShape.from_hf_dir(make_model(tmp_path, family))
    on_disk = {name: math.prod(full) for name, full in hf_tensor_shapes(shape).items()}
    counted = stage_parameters(shape, shape.layers[:1], ONE_PROCESS, shape.vocab_size, True, False)
    counted += stage_parameters(shape, shape.layers[1:], ONE_PROCESS, shape.vocab_size, False, True)
    tied = shape.tie_word_embeddings * shape.vocab_size * shape.hidden_size
    assert counted.total == sum(on_disk.values()) + tied
    assert counted.experts == sum(n for name, n in on_disk.items() if ".experts." in name)
    assert model_parameters(shape).total == sum(on_disk.values())


def test_published_numbers():
    """Model cards say 30.5 billion with 3.3 active, 235 with 22, 671 with 37; GPT-OSS's has two decimals."""
    assert model_parameters(MOE_STUDENT).total / 1e9 == pytest.approx(30.5, abs=0.05)
    assert active_parameters(MOE_STUDENT) / 1e9 == pytest.approx(3.35, abs=0.05)
    assert model_parameters(MOE_TEACHER).total / 1e9 == pytest.approx(235, abs=0.5)
    assert active_parameters(MOE_TEACHER) / 1e9 == pytest.approx(22, abs=0.5)
    assert active_parameters(STUDENT) == model_parameters(STUDENT).total
    assert model_parameters(DEEPSEEK_V3).total / 1e9 == pytest.approx(671, abs=0.5)
    assert active_parameters(DEEPSEEK_V3) / 1e9 == pytest.approx(37.5, abs=0.5)
    for num_layers, num_experts, total, active in ((36, 128, 116.83, 5.13), (24, 32, 20.91, 3.61)):
        shape = gpt_oss(num_layers, num_experts)
        embedding = shape.vocab_size * shape.hidden_size  # the card leaves it out of the active ones
        assert model_parameters(shape).total / 1e9 == pytest.approx(total, abs=0.005)
        assert (active_parameters(shape) - embedding) / 1e9 == pytest.approx(active, abs=0.005)


def built(folder, tensor_parallel, expert_parallel):
    """Return (parameters of routed experts, others) of this rank's model, and what the plan counts."""
    import torch

    from mkd.convert.models import build_model
    from mkd.parallel.context import ParallelContext
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    shape = ModelShape.from_hf_dir(folder)
    context = ParallelContext.create(detect(), Sizes(tensor=tensor_parallel, expert=expert_parallel))
    model = build_model(shape, torch.float32, context)
    held = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        held[".experts." in name] += parameter.numel()
    rows = shape.padded_vocab_size(tensor_parallel) // tensor_parallel
    counted = stage_parameters(shape, shape.layers, context.sizes, rows, True, True)
    return (held[True], held[False]), (counted.experts, counted.dense)


@pytest.mark.parametrize(
    ("family", "size", "tensor", "experts"),
    [
        ("qwen3_moe", 1, 1, 1),
        ("qwen3_moe", 2, 1, 2),
        ("qwen3_moe", 2, 2, 2),
        ("mixtral", 2, 2, 1),
        ("deepseek-experts", 2, 2, 2),
        ("moonlight-experts", 2, 1, 2),
        ("gpt_oss", 2, 2, 2),
        ("qwen3_next", 2, 2, 2),
        ("nemotron_h-experts", 2, 2, 2),
    ],
)
def test_a_process_holds_what_is_counted(family, size, tensor, experts, tmp_path, ranks):
    """Experts are divided by expert parallelism alone, the rest by tensor parallelism alone."""
    folder = make_model(tmp_path, family)
    for held, counted in ranks.run(built, size, folder, tensor, experts):
        assert held == counted and min(held) > 0


def test_mlps_without_gates_have_two_matrices():
    """Their up projection is h f, and so is their down projection; with biases f and h."""
    shape = replace(STUDENT, tie_word_embeddings=False)
    ungated = replace(shape, layers=tuple(replace(layer, is_gated=False) for layer in shape.layers))
    gate = 2048 * 6144
    assert model_parameters(shape).total - model_parameters(ungated).total == 28 * gate
    assert matmul_parameters(shape) - matmul_parameters(ungated) == 28 * gate
    biased = replace(ungated, layers=tuple(replace(layer, mlp_bias=True) for layer in ungated.layers))
    assert model_parameters(biased).total - model_parameters(ungated).total == 28 * (6144 + 2048)
    kept = [activations.layer_bytes(one.layers[0]) for activations, one in _activations(shape, ungated)]
    assert kept[0] - kept[1] == SEQ_LENGTH * 6144 * 2


def _activations(*shapes):
    return [(replace(student_activations(), shape=shape), shape) for shape in shapes]
