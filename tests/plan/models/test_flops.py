from __future__ import annotations

import pytest
from safetensors.torch import load_file

from mkd.plan.models.flops import (
    distillation_flops,
    forward_flops,
    layer_attention_flops,
    layer_matmul_parameters,
)
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import STUDENT, TEACHER
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
    assert layer_attention_flops(TEACHER, 100**2 + 20**2) * 36 == attention


def test_latent_attention_by_hand():
    """3 heads of 18 channels in QK^T and 6 in AV."""
    shape = ModelShape.from_hf_config(config_of("deepseek"))
    assert layer_attention_flops(shape, 10**2) == 3 * (18 + 6) * 10**2


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
