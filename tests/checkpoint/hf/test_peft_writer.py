"""Names of adapters: those of transformers' modules, and what PEFT does not load is said."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

from mkd.checkpoint.hf import peft_writer
from mkd.checkpoint.hf.hf_names import hf_tensor_shapes
from mkd.checkpoint.hf.hf_tower import DiskNames
from mkd.plan.models.model_shape import ModelShape
from tests.tiny_vision_models import FAMILIES, vision_config

HEADS = "lm_head.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_tensor_has_the_name_of_transformers_module(family):
    """Files of Qwen2.5-VL have older names, with which PEFT finds no module."""
    config = vision_config(family)
    with torch.device("meta"):
        model = getattr(transformers, f"{FAMILIES[family][0]}ForConditionalGeneration")(config)
    shape = ModelShape.from_hf_config(config.to_dict())
    names = DiskNames.of_shape(shape)
    known = {name for name, _ in model.named_parameters()} | {HEADS}
    linear = [name for name in hf_tensor_shapes(shape) if ".experts." not in name]
    assert len(linear) > 30
    assert [name for name in linear if names.in_transformers(name) not in known] == []


@pytest.mark.parametrize(
    ("model_type", "end", "targets"),
    [
        ("deepseek_v3", "mlp.shared_experts.gate_proj", "qkv proj"),
        ("nemotron_h", "mixer.out_proj", "qkv fc1 fc2"),
        ("deepseek_v3", "self_attn.o_proj", None),
        ("qwen3_5_moe_text", "mlp.shared_expert.gate_proj", None),
        ("nemotron_h", "mixer.o_proj", None),
    ],
)
def test_adapters_that_peft_leaves_out_are_said(model_type, end, targets, caplog):
    with caplog.at_level(logging.WARNING, logger="mkd"):
        peft_writer._warn_of_peft(model_type, {f"model.layers.1.{end}.weight"})
    said = [record.message for record in caplog.records]
    assert len(said) == (targets is not None)
    assert targets is None or f"--lora-targets {targets}" in said[0]
