from __future__ import annotations

import pytest
from safetensors.torch import load_file

from mkd.plan.models.flops import (
    distillation_flops,
    forward_flops,
    layer_matmul_parameters,
    layer_mixing_flops,
)
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import QWEN3_5_9B, STUDENT, TEACHER
from tests.tiny_models import config_of, make_model


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3", "deepseek", "moonlight"])
def test_layer_parameters_are_the_matrices_of_a_layer(family, tmp_path):
    folder = make_model(tmp_path / family, family)
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    matrices = [t.numel() for name, t in tensors.items() if ".layers.2." in name and t.dim() == 2]
    shape = ModelShape.from_hf_dir(folder)
    assert matrices and layer_matmul_parameters(shape, shape.layers[2]) == sum(matrices)


def test_forward_by_hand():
    """A layer of 8B: attention 4096 x (4096 + 1024 + 1024 + 4096), MLP 3 x 4096 x 12288.

    Each parameter takes 2 FLOPs a token.
    """
    layer = 4096 * 10240 + 3 * 4096 * 12288
    body_and_head = 36 * layer + 4096 * 151936
    attention = 36 * 2 * 4096 * (100**2 + 20**2)  # 2 n^2 d heads: QK^T and AV, half of each
    assert forward_flops(TEACHER, [100, 20]) == 2 * body_and_head * 120 + attention
    assert layer_mixing_flops(TEACHER, TEACHER.layers[0], 120, 100**2 + 20**2) * 36 == attention


def test_latent_attention_by_hand():
    """3 heads of 18 channels in QK^T and 6 in AV."""
    shape = ModelShape.from_hf_config(config_of("deepseek"))
    assert layer_mixing_flops(shape, shape.layers[0], 10, 10**2) == 3 * (18 + 6) * 10**2


def test_gated_delta_nets_by_hand():
    """Count Qwen3.5-9B: 135 + 6 MFLOP a token in a mixer, 117 in projections of attention, 302 in an MLP."""
    shape, tokens = QWEN3_5_9B, 4096
    mixer, attention = shape.layers[2], shape.layers[3]
    assert mixer.mixer and attention.has_attention
    mlp = 3 * 4096 * 12288
    projected = 16 * (2 * 128 + 2 * 2 * 128 + 2 * 2)  # query, key, 2 values and z, b and a of a key head
    assert layer_matmul_parameters(shape, mixer) == 4096 * (projected + 4096) + mlp
    assert layer_matmul_parameters(shape, attention) == 4096 * 256 * (3 * 16 + 2 * 4) + mlp
    recurrence = 32 * (6 * 128 * 128 + 64 * 10 * 128) + 2 * 4 * 16 * 4 * 128
    assert layer_mixing_flops(shape, mixer, tokens, tokens**2) == tokens * recurrence
    assert layer_mixing_flops(shape, attention, tokens, tokens**2) == 2 * 16 * 256 * tokens**2
    head = 4096 * 248320
    parameters = 24 * layer_matmul_parameters(shape, mixer) + 8 * layer_matmul_parameters(shape, attention)
    mixing = 24 * tokens * recurrence + 8 * 2 * 16 * 256 * tokens**2
    assert forward_flops(shape, [tokens]) == 2 * tokens * (parameters + head) + mixing


def test_a_frozen_teacher_has_no_backward():
    documents = [64, 64]
    student, teacher = forward_flops(STUDENT, documents), forward_flops(TEACHER, documents)
    assert distillation_flops(STUDENT, (), documents) == 3 * student
    assert distillation_flops(STUDENT, (TEACHER,), documents) == 3 * student + teacher


def test_every_teacher_has_its_own_documents():
    documents, own = [64, 64], [70, 50]
    expected = (
        3 * forward_flops(STUDENT, documents)
        + forward_flops(TEACHER, documents)
        + forward_flops(STUDENT, own)
    )
    assert distillation_flops(STUDENT, (TEACHER, STUDENT), documents, (None, own)) == expected
