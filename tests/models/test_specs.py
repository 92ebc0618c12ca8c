"""Check that both layer specs follow a layer's shape; Transformer Engine's is checked without the library."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention

from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.models import specs
from mkd.models.attention import LayerRopeAttention, PackedAttention
from mkd.models.norm import RMSNorm
from mkd.models.post_norm import PostNorm
from mkd.platform import detect

ROPES = (RopeShape(theta=1e4, rotary_dim=8), RopeShape(theta=1e6, rotary_dim=8))
PLAIN = LayerShape(ffn_hidden_size=32, rope=ROPES[0])
RICH = LayerShape(ffn_hidden_size=32, rope=ROPES[1], qk_norm=True, post_norms=True)


@pytest.fixture
def transformer_engine(monkeypatch):
    """Replace Transformer Engine: Megatron's function for its layers returns the local ones."""
    asked = []

    def layer(qk_layernorm):
        asked.append(qk_layernorm)
        return specs.local_layer_spec(replace(PLAIN, qk_norm=qk_layernorm))

    monkeypatch.setattr(specs, "HAVE_TE", True)
    monkeypatch.setattr(specs, "get_gpt_layer_with_transformer_engine_spec", layer)
    return asked


def parts(spec):
    attention, mlp = spec.submodules.self_attention, spec.submodules.mlp
    return attention, attention.submodules.linear_proj, mlp.submodules.linear_fc2


def check(block, norm):
    plain, rich = block.layer_specs
    assert block.layer_norm is norm
    attention, *ends = parts(plain)
    assert attention.module is LayerRopeAttention and attention.params["rope_index"] == 0
    assert not any(issubclass(end, PostNorm) for end in ends)
    attention, *ends = parts(rich)
    assert attention.module is LayerRopeAttention and attention.params["rope_index"] == 1
    assert all(issubclass(end, PostNorm) and end.norm_class is norm for end in ends)


def test_local_layers_have_their_own_parts():
    check(specs.block_spec((PLAIN, RICH), ROPES, transformer_engine=False), RMSNorm)


def test_transformer_engine_layers_have_their_own_parts(transformer_engine):
    check(specs.block_spec((PLAIN, RICH), ROPES, transformer_engine=True), TENorm)
    assert transformer_engine == [False, True]


def test_layers_with_one_rope_are_those_of_megatron(transformer_engine):
    for has_te in (False, True):
        (spec,) = specs.block_spec((PLAIN,), ROPES[:1], has_te).layer_specs
        attention, *ends = parts(spec)
        assert attention.module is SelfAttention and "rope_index" not in attention.params
        assert not any(issubclass(end, PostNorm) for end in ends)


def test_packed_attention_replaces_the_core_only(transformer_engine):
    (spec,) = specs.block_spec((RICH,), ROPES, True, packed_attention=True).layer_specs
    assert parts(spec)[0].submodules.core_attention is PackedAttention


def test_a_zero_centred_norm_multiplies_by_one_plus_its_weight():
    detect()  # on the CPU: replaces torch.cuda
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, layernorm_zero_centered_gamma=True
    )
    norm = RMSNorm(config, 8, 1e-6)
    assert not norm.weight.any(), "it starts as the identity"
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 8)
    expected = torch.nn.functional.rms_norm(x, (8,), 1 + norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
