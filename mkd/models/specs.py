"""Layer specifications for Megatron's decoder.

Their parts are Transformer Engine's where it is installed, else Megatron's own with mkd's norm and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.families.mixer_shape import DeltaShape, MixerShape
from mkd.models.attention import (
    GatedAttention,
    GrowingQueryAttention,
    LayerRopeAttention,
    PackedAttention,
    RowRopeAttention,
    UnrotatedAttention,
)
from mkd.models.head_norms import JointNormAttention, TurnedNormAttention
from mkd.models.latent_attention import LatentAttention, LatentAttentionParts
from mkd.models.layer_parts import GatedMLP, RMSNorm, ScaledLayer, with_post_norm
from mkd.models.lora import adapted_column, adapted_row
from mkd.models.mixers.delta_net import DeltaNet
from mkd.models.mixers.mamba import Mamba
from mkd.models.mixers.mixer import MixerParts
from mkd.models.moe.latent import with_latents
from mkd.models.moe.layer import LOCAL_EXPERTS, TRANSFORMER_ENGINE_EXPERTS, ExpertParts, moe_spec
from mkd.models.moe.split_layer import SplitLayer
from mkd.models.own_heads import NormedValueAttention, OwnHeadsAttention, SharedKeyAttention, without_values
from mkd.models.sink_attention import SinkAttention
from mkd.models.xielu import XIELUMLP
from mkd.plan.models.lora_shape import LoRAShape


@dataclass(frozen=True)
class LayerParts:
    """The modules that a layer is made of."""

    norm: type
    first_norm: type  # norm in front of attention and MLP, if `column_linear` has none inside
    column_linear: type
    plain_column_linear: type  # never with a norm inside
    row_linear: type
    core_attention: type
    mlp: type
    experts: ExpertParts
    lora: LoRAShape | None = None  # adapters of the linear layers

    def with_norms_apart(self) -> LayerParts:
        """Return these parts with every norm in front of its linear layer, not inside."""
        return replace(self, column_linear=self.plain_column_linear, first_norm=self.norm)

    def with_adapters(self, lora: LoRAShape) -> LayerParts:
        """Return parts of layers with adapters, which read the output of the norm."""
        return replace(self.with_norms_apart(), lora=lora)


LOCAL = LayerParts(
    norm=RMSNorm,
    first_norm=RMSNorm,
    column_linear=ColumnParallelLinear,
    plain_column_linear=ColumnParallelLinear,
    row_linear=RowParallelLinear,
    core_attention=PackedAttention,
    mlp=MLP,
    experts=LOCAL_EXPERTS,
)
TRANSFORMER_ENGINE = LayerParts(
    norm=TENorm,
    first_norm=IdentityOp,
    column_linear=TELayerNormColumnParallelLinear,
    plain_column_linear=TEColumnParallelLinear,
    row_linear=TERowParallelLinear,
    core_attention=TEDotProductAttention,
    mlp=GatedMLP,
    experts=TRANSFORMER_ENGINE_EXPERTS,
)


def block_spec(
    layers: Sequence[LayerShape],
    ropes: Sequence[RopeShape],  # the distinct ones of the whole model
    transformer_engine: bool,
    packed_attention: bool = False,
    groups: ProcessGroupCollection | None = None,
    lora: LoRAShape | None = None,
    norms_apart: bool = False,
) -> TransformerBlockSubmodules:
    """Return the decoder layers of one model part and its final norm.

    If `packed_attention`, use mkd's own attention in Transformer Engine's layers. The local layers always
    have it. Experts communicate over `groups`. `lora`: adapters of the linear layers, which read outputs of
    norms. `norms_apart`: norms are modules of their own without adapters too.
    """
    parts = TRANSFORMER_ENGINE if transformer_engine and HAVE_TE else LOCAL
    if packed_attention:
        parts = replace(parts, core_attention=PackedAttention)
    parts = parts.with_norms_apart() if norms_apart else parts
    parts = parts if lora is None else parts.with_adapters(lora)
    specs = [
        layer_spec(layer, parts, ropes.index(layer.rope) if layer.rope and len(ropes) > 1 else None, groups)
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm)


def layer_spec(
    layer: LayerShape, parts: LayerParts, rope_index: int | None, groups: ProcessGroupCollection | None = None
) -> ModuleSpec:
    """Return one layer. Its checkpoint keys are the same whatever its parts.

    `rope_index` selects one of several rotary embeddings; None if the model has one.
    """
    row_linear, norms = _row_linear(layer, parts, "proj"), {}
    if layer.mixer is not None:
        attention = _mixer(layer.mixer, parts, row_linear)
    elif layer.mla is not None:
        assert rope_index is None, "the layers of latent attention have one position embedding"
        attention = _latent_attention(layer, parts, row_linear)
    else:
        attention = _grouped_query_attention(layer, parts, row_linear, rope_index)
        norms = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if layer.moe is None:
        column_linear = parts.column_linear if layer.pre_norms else parts.plain_column_linear
        column_linear = adapted_column(column_linear, parts.lora, "fc1", layer.is_gated)
        linears = MLPSubmodules(linear_fc1=column_linear, linear_fc2=_row_linear(layer, parts, "fc2"))
        ungated = XIELUMLP if layer.activation == "xielu" else MLP
        module = parts.mlp if layer.is_gated else ungated
        params = {} if module is MLP else {"groups": groups}
        mlp = ModuleSpec(module=module, params=params, submodules=linears)
        norms["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    else:
        mlp = moe_spec(layer.moe, _experts(layer, parts), groups, parts.norm)
        mlp = with_latents(mlp, layer.moe.latent_size) if layer.moe.latent_size else mlp
    attention_norm = parts.first_norm if "input_layernorm." in norms else parts.norm
    mlp_norm = parts.first_norm if layer.is_dense else parts.norm
    has_mlp_norm = layer.pre_norms and not layer.has_inner_norms
    submodules = TransformerLayerSubmodules(
        input_layernorm=attention_norm if layer.pre_norms else IdentityOp,
        self_attention=attention,
        self_attn_bda=residual_add(layer.residual_scale),
        pre_mlp_layernorm=mlp_norm if has_mlp_norm else IdentityOp,
        mlp=mlp,
        mlp_bda=residual_add(layer.residual_scale),
        sharded_state_dict_keys_map=norms,
    )
    return ModuleSpec(module=_layer_class(layer), submodules=replace(submodules, **_left_out(layer)))


def _row_linear(layer: LayerShape, parts: LayerParts, target: str) -> type:
    linear = adapted_row(parts.row_linear, parts.lora, target)
    return with_post_norm(linear, parts.norm) if layer.post_norms else linear


def _experts(layer: LayerShape, parts: LayerParts) -> ExpertParts:
    """Return the parts of a layer's experts. Of them only the shared ones have adapters."""
    column, row = parts.experts.shared_linears.linear_fc1, parts.experts.shared_linears.linear_fc2
    column = adapted_column(column, parts.lora, "fc1", layer.is_gated)
    shared = MLPSubmodules(linear_fc1=column, linear_fc2=adapted_row(row, parts.lora, "fc2"))
    return replace(parts.experts, shared_linears=shared)


def _left_out(layer: LayerShape) -> dict[str, type]:
    """Return parts that do nothing, in place of what a layer with an MLP alone, or without one, lacks."""
    found = dict[str, type]()
    if not layer.mixes_tokens:
        found |= dict(input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    if not layer.has_mlp:
        found |= dict(pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    return found


def _layer_class(layer: LayerShape) -> type[TransformerLayer]:
    if layer.output_scale:
        return ScaledLayer
    return TransformerLayer if layer.is_dense else SplitLayer


def _grouped_query_attention(
    layer: LayerShape, parts: LayerParts, row_linear: type, rope_index: int | None
) -> ModuleSpec:
    head_norm = parts.norm if layer.qk_norm else IdentityOp
    core_attention = SinkAttention if layer.attention_sinks else parts.core_attention
    if layer.heads is not None and layer.heads.is_wide:
        core_attention = PackedAttention
    column_linear = parts.column_linear if layer.pre_norms else parts.plain_column_linear
    column_linear = without_values(column_linear) if layer.shared_key_value else column_linear
    module, params = _attention_module(layer, rope_index)
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal} | params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=adapted_column(column_linear, parts.lora, "qkv"),
            core_attention=core_attention,
            linear_proj=row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _attention_module(layer: LayerShape, rope_index: int | None) -> tuple[type, dict[str, object]]:
    """Return the class of grouped-query attention with the layer's positions and norms; its parameters."""
    rope, bases, params = layer.rope, list[type](), dict[str, object]()
    if rope is None:
        bases.append(UnrotatedAttention)
    elif rope.query_growth:
        assert rope_index is None and not rope.sections, "no family has both"
        bases.append(GrowingQueryAttention)
    elif rope.sections:
        bases.append(RowRopeAttention)
        params["attention_factor"] = rope.attention_factor
    elif rope_index is not None or layer.qk_norm_turned:
        bases.append(TurnedNormAttention if layer.qk_norm_turned else LayerRopeAttention)
        params |= dict(rope_index=rope_index, attention_factor=rope.attention_factor)
        params["rotary_dim"] = rope.rotary_dim
    if layer.output_gate:  # it makes the queries that a class before it turns
        assert rope_index is None and rope, "gated attention has one rope"
        bases.append(GatedAttention)
    if layer.joint_qk_norm is not None:  # before the rotation, so behind its class
        bases.append(JointNormAttention)
        params["norm_channels"] = layer.joint_qk_norm
    if layer.value_norm:
        bases.append(NormedValueAttention)
    if layer.shared_key_value:
        bases.append(SharedKeyAttention)
    if layer.heads is not None:
        bases.append(OwnHeadsAttention)
        params["heads"] = layer.heads
    return _one_class(tuple(bases or [SelfAttention])), params


@cache
def _one_class(bases: tuple[type, ...]) -> type:
    return bases[0] if len(bases) == 1 else type("".join(base.__name__ for base in bases), bases, {})


def _latent_attention(layer: LayerShape, parts: LayerParts, row_linear: type) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "layer": layer},
        submodules=LatentAttentionParts(
            adapted_column(parts.plain_column_linear, parts.lora, "qkv"),
            row_linear,
            parts.norm,
            parts.core_attention,
        ),
    )


def _mixer(mixer: MixerShape, parts: LayerParts, row_linear: type) -> ModuleSpec:
    linears = MixerParts(adapted_column(parts.plain_column_linear, parts.lora, "qkv"), row_linear)
    module = DeltaNet if isinstance(mixer, DeltaShape) else Mamba
    return ModuleSpec(module=module, params={"mixer": mixer}, submodules=linears)


Addition = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def residual_add(scale: float) -> Callable[[bool, bool], Addition]:
    """Return the addition of a block's output times `scale` to the residual, as Megatron's layer asks for it.

    mkd has no dropout, so that it is one plain addition. Megatron's, compiled by torch, costs 0.13 ms of CPU
    time a call.
    """

    def for_mode(training: bool, fused: bool) -> Addition:
        return partial(_add, scale=scale)

    return for_mode


def _add(
    output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float, scale: float
) -> Tensor:
    output, bias = output_with_bias
    assert dropout == 0.0, "mkd's models have no dropout"
    output = output if bias is None else output + bias
    if torch.is_grad_enabled():
        return residual.add(output, alpha=scale)
    return torch.add(residual, output, alpha=scale, out=output)
