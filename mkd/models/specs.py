"""Layer specifications for Megatron's decoder.

They are Transformer Engine's where it is installed, else Megatron's own layers with mkd's norm and attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.models.attention import LayerRopeAttention, PackedAttention
from mkd.models.norm import RMSNorm
from mkd.models.post_norm import with_post_norm


def block_spec(
    layers: Sequence[LayerShape],
    ropes: Sequence[RopeShape],  # the distinct ones of the whole model
    transformer_engine: bool,
    packed_attention: bool = False,
) -> TransformerBlockSubmodules:
    """Return the decoder layers of one model part and its final norm.

    If `packed_attention`, use mkd's own attention in Transformer Engine's layers. The local layers always
    have it.
    """
    if transformer_engine and HAVE_TE:
        specs, norm = [te_layer_spec(layer, packed_attention) for layer in layers], TENorm
    else:
        specs, norm = [local_layer_spec(layer) for layer in layers], RMSNorm
    for layer, spec in zip(layers, specs, strict=True):
        if layer.post_norms:
            _add_post_norms(spec, norm)
        if len(ropes) > 1:
            _select_rope(spec, ropes.index(layer.rope))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _add_post_norms(spec: ModuleSpec, norm: type) -> None:
    """Add a norm at the end of attention and MLP."""
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_proj = with_post_norm(attention.linear_proj, norm)
    mlp.linear_fc2 = with_post_norm(mlp.linear_fc2, norm)


def _select_rope(spec: ModuleSpec, index: int) -> None:
    """Select one of several rotary embeddings for attention."""
    attention = spec.submodules.self_attention
    attention.module = LayerRopeAttention
    attention.params = attention.params | {"rope_index": index}


def te_layer_spec(layer: LayerShape, packed_attention: bool) -> ModuleSpec:
    """Return a layer of Transformer Engine's modules, which keep the norms inside the linear layers.

    A norm is part of the linear layer that follows it.
    """
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=layer.qk_norm)
    if packed_attention:
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def local_layer_spec(layer: LayerShape) -> ModuleSpec:
    """Return a layer of Megatron's modules, with the checkpoint keys of the Transformer Engine spec."""
    head_norm = RMSNorm if layer.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
