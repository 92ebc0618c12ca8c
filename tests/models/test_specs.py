"""Check that both layer specs follow a layer's shape; Transformer Engine's is checked without the library."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.models import specs
from mkd.models.attention import LayerRopeAttention, PackedAttention
from mkd.models.layer_parts import PostNorm, RMSNorm
from mkd.platform import detect

ROPES = (RopeShape(theta=1e4, rotary_dim=8), RopeShape(theta=1e6, rotary_dim=8))
PLAIN = LayerShape(ffn_hidden_size=32, rope=ROPES[0])
RICH = LayerShape(ffn_hidden_size=32, rope=ROPES[1], qk_norm=True, post_norms=True)


@pytest.fixture
def transformer_engine(monkeypatch):
    """Pretend that Transformer Engine is installed: its layers get a class of their own that ends a block."""

    class Row(RowParallelLinear):
        pass

    monkeypatch.setattr(specs, "HAVE_TE", True)
    parts = replace(specs.TRANSFORMER_ENGINE, row_linear=Row)
    monkeypatch.setattr(specs, "TRANSFORMER_ENGINE", parts)
    return parts


def parts(spec):
    attention, mlp = spec.submodules.self_attention, spec.submodules.mlp
    return attention, attention.submodules.linear_proj, mlp.submodules.linear_fc2


def check(block, made_of):
    plain, rich = block.layer_specs
    assert block.layer_norm is made_of.norm
    attention, *ends = parts(plain)
    assert attention.module is LayerRopeAttention and attention.params["rope_index"] == 0
    assert ends == [made_of.row_linear] * 2
    assert attention.submodules.q_layernorm is attention.submodules.k_layernorm is IdentityOp
    attention, *ends = parts(rich)
    assert attention.module is LayerRopeAttention and attention.params["rope_index"] == 1
    assert all(issubclass(end, made_of.row_linear) and end.norm_class is made_of.norm for end in ends)
    assert all(issubclass(end, PostNorm) for end in ends)
    assert attention.submodules.q_layernorm is attention.submodules.k_layernorm is made_of.norm
    assert attention.submodules.core_attention is made_of.core_attention


def test_local_layers_have_their_own_parts():
    check(specs.block_spec((PLAIN, RICH), ROPES, transformer_engine=False), specs.LOCAL)


def test_transformer_engine_layers_have_their_own_parts(transformer_engine):
    check(specs.block_spec((PLAIN, RICH), ROPES, transformer_engine=True), transformer_engine)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_transformer_engine_layers_are_those_of_megatron(qk_norm, monkeypatch):
    """Compare with Megatron's own specification; newer versions wrap the MLP in a partial."""
    # Without the library, Megatron's classes exist but its specification neither imports nor finds them.
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    monkeypatch.setattr(provider, "is_te_min_version", lambda version: True)
    layer = replace(PLAIN, qk_norm=qk_norm)
    ours = specs.layer_spec(layer, specs.TRANSFORMER_ENGINE, None).submodules
    theirs = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm).submodules
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        assert getattr(ours, name) is getattr(theirs, name), name
    assert ours.self_attention.module is theirs.self_attention.module
    assert ours.self_attention.params == theirs.self_attention.params
    assert ours.self_attention.submodules == theirs.self_attention.submodules
    mlp = theirs.mlp.keywords["submodules"] if isinstance(theirs.mlp, partial) else theirs.mlp.submodules
    assert ours.mlp.submodules == mlp


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
