"""Check the figures that compare two sets of logits; tests/commands/test_convert.py compares real models."""

from __future__ import annotations

import json

import pytest
import torch

from mkd.convert.parity import Parity, random_documents, transformers_logits
from mkd.errors import CheckpointError
from mkd.evaluation.model_comparison import ComparedModel
from tests.reported import refused
from tests.tiny_models import make_model
from tests.tiny_vision_models import VOCABULARY, make_vision_model


def test_parity_figures():
    reference = torch.tensor([[1.0, 2.0, -4.0], [0.0, 0.5, 3.0]])
    # a constant shift changes logits, not probabilities
    same = Parity.from_logits(reference, reference + 1.0)
    assert same.max_logit_difference == 1.0 and same.relative_difference == 0.25
    assert abs(same.kl) < 1e-15 and same.top1_agreement == 1.0
    other = Parity.from_logits(torch.tensor([[0.0, 0.0]] * 2), torch.tensor([[0.0, -1.0], [0.0, 1.0]]))
    # KL([1/2, 1/2] || softmax([0, -1])) = ln((1 + e^-1) / 2) + 1/2
    assert other.kl == pytest.approx(0.1201145, abs=1e-6)
    assert other.top1_agreement == 0.5


def test_random_documents_have_several_lengths_and_repeat():
    first, second = random_documents(50, 3, 12, seed=7), random_documents(50, 3, 12, seed=7)
    assert [len(ids) for ids in first] == [12, 6, 4]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_that_transformers_does_not_know_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    with pytest.raises(CheckpointError) as raised:
        transformers_logits(tmp_path, [torch.zeros(2, dtype=torch.int64)], torch.device("cpu"))
    assert raised.value.code == "model-config-not-valid" and "deepseek_v3" in str(raised.value)


def test_a_model_that_transformers_refuses_is_one_error(tmp_path):
    """Its check of config.json raises an error of its own class, and that of shapes a RuntimeError."""
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    whole = json.loads((folder / "config.json").read_text())
    for change in ({"rms_norm_eps": None}, {"intermediate_size": 32}):
        (folder / "config.json").write_text(json.dumps(whole | change))
        with refused("model-config-not-valid: transformers cannot load", CheckpointError):
            transformers_logits(folder, [torch.zeros(2, dtype=torch.int64)], torch.device("cpu"))
        with refused("model-config-not-valid: transformers cannot load", CheckpointError):
            ComparedModel.load(folder, torch.float32, torch.device("cpu"))


def test_a_model_with_images_is_compared_on_texts(tmp_path):
    folder = make_vision_model(tmp_path, "qwen3_vl_moe")
    logits = transformers_logits(folder, [torch.arange(1, 5)], torch.device("cpu"))
    assert logits.shape == (4, VOCABULARY)
