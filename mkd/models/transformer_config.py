"""`ModelShape` -> Megatron's `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mkd.families.layer_shape import QUICK_GELU_GAIN, LayerShape
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import LoRAShape
from mkd.plan.models.model_shape import ModelShape

MIXER = "mixer"  # of `recompute_modules`: what a layer has in place of attention


@dataclass(frozen=True)
class ModelOptions:
    """The user's choices about how a model runs, as opposed to what it is (`ModelShape`)."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute_granularity: str | None = None  # full | selective
    recompute_method: str | None = None  # uniform | block
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)  # parts of a layer, for selective
    deterministic: bool = False
    balance_coeff: float = 0.0  # of the experts' balance loss; see moe/balance.py
    z_coeff: float = 0.0  # of the routers' z loss
    # Decoder layers give up their memory when they are built; a `LayerStream` gives them weights.
    releases_layers: bool = False
    lora: LoRAShape | None = None  # adapters; None: the model has none
    norms_apart: bool = False  # norms are never inside linear layers, as in a model with adapters
    fp8_recipe: str | None = None  # of products in training; None: they have the precision of the run
    own_attention: bool = False  # mkd's in place of Transformer Engine's; see attention_check.py


def transformer_config(
    shape: ModelShape, layout: PipelineLayout, options: ModelOptions, context: ParallelContext
) -> TransformerConfig:
    """Build the configuration of one model.

    Teacher and student never share the object, because schedules write callbacks into it.
    """
    groups, windows = shape.padded_query_groups(context.tp_size), shape.sliding_windows
    assert len(windows) <= 1, f"Megatron has one window size a model, this model has {windows}"
    interleaved = context.virtual_stages > 1
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.common("ffn_hidden_size"),
        num_attention_heads=groups * shape.heads_per_group,
        num_query_groups=groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.common("qk_norm"),
        attention_output_gate=shape.common("output_gate"),
        layernorm_zero_centered_gamma=shape.zero_centered_norms,
        softmax_scale=shape.attention_scale,
        add_bias_linear=shape.common("attention_output_bias") or shape.common("mlp_bias"),
        add_qkv_bias=shape.common("qkv_bias"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        window_size=(windows[0] - 1, 0) if windows else None,
        window_attn_skip_freq=[int(layer.sliding_window is not None) for layer in shape.layers],
        init_method_std=shape.initializer_range,
        perform_initialization=True,  # it marks weights as tensor-parallel, which the gradient norm reads
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        pipeline_dtype=options.dtype,
        tensor_model_parallel_size=context.tp_size,
        sequence_parallel=options.sequence_parallel and context.tp_size > 1,
        context_parallel_size=context.cp_size,
        cp_comm_type="a2a" if windows else "p2p",  # Transformer Engine's ring has no sliding window
        pipeline_model_parallel_size=context.pp_size,
        virtual_pipeline_model_parallel_size=context.virtual_stages if interleaved else None,
        pipeline_model_parallel_layout=layout.to_megatron() if context.pp_size > 1 else None,
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        variable_seq_lengths=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=context.platform.apex,
        disable_parameter_transpose_cache=options.fp8_recipe is not None,  # see fp8_layers.py
        **_rope_switches(shape, context.platform.transformer_engine),
        masked_softmax_fusion=False,
        deterministic_mode=options.deterministic and context.platform.is_cuda,
        **_recomputation(options),
        **_mlp_switches(shape, context.platform.is_cuda),
        **moe_switches(shape, context),
        # Layers with unlike parameters (sic): checkpoints do not stack them.
        hetereogenous_dist_checkpoint=any(map(_is_unlike, shape.layers)),
    )
    config.recompute_modules = list(options.recompute_modules)  # Megatron does not know mkd's mixers
    return config


def _is_unlike(layer: LayerShape) -> bool:
    """Return True if other layers of the model have other parameters, beside dense and expert ones."""
    return not layer.is_transformer_layer or layer.heads is not None


def _rope_switches(shape: ModelShape, has_fused: bool) -> dict[str, bool]:
    """Return the arguments of `TransformerConfig` for the rotation."""
    is_interleaved = any(rope.interleaved for rope in shape.ropes)
    return dict(
        rotary_interleaved=is_interleaved,
        apply_rope_fusion=has_fused and all(rope.is_plain_rotation for rope in shape.ropes),
    )


def _recomputation(options: ModelOptions) -> dict[str, Any]:
    """Return the arguments of `TransformerConfig` for recomputation, without the names of mkd's own parts."""
    return dict(
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        recompute_modules=[name for name in options.recompute_modules if name != MIXER],
    )


def _mlp_switches(shape: ModelShape, is_cuda: bool) -> dict[str, Any]:
    """Return the arguments of `TransformerConfig` for the MLP.

    Megatron's fused gate would clamp before it adds the bias.
    """
    limit, is_gated = shape.common("mlp_limit"), shape.common("is_gated")
    return dict(
        gated_linear_unit=is_gated,
        activation_func=_activation(shape.common("activation"), is_cuda),
        activation_func_clamp_value=limit,
        glu_linear_offset=shape.common("up_offset"),
        bias_activation_fusion=is_cuda and limit is None and is_gated,
    )


def _activation(name: str, is_fused: bool) -> Callable[[Tensor], Tensor]:
    """Return the function of the gate, or of the up projection, in the form that Megatron expects.

    Megatron's fused gated GELU is called `F.gelu` and has the tanh form.
    """
    if name == "gelu_tanh":
        return F.gelu if is_fused else gelu_tanh
    if name == "quick_gelu":
        return _quick_gelu
    if name == "xielu":
        return _learned
    if name == "squared_relu":
        return _squared_relu
    assert name == "silu", name
    return F.silu


def _learned(x: Tensor) -> Tensor:
    raise AssertionError("the activation of each layer has parameters")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(QUICK_GELU_GAIN * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def moe_switches(shape: ModelShape, context: ParallelContext) -> dict[str, Any]:
    """Return the arguments of `TransformerConfig` for the model's experts; {} for a dense model.

    Tokens are never dropped, and the router computes in fp32. Megatron's balance losses stay off: they
    depend on the layout (see balance.py).
    """
    moe = shape.moe
    if moe is None:
        return {}
    fused = context.platform.transformer_engine
    has_groups = moe.top_groups < moe.num_groups
    is_mixed = any(layer.is_dense for layer in shape.layers)
    return dict(
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.top_k,
        moe_ffn_hidden_size=moe.ffn_hidden_size,
        moe_layer_freq=[int(not layer.is_dense) for layer in shape.layers] if is_mixed else 1,
        moe_router_score_function=moe.scores,
        moe_router_pre_softmax=moe.scores == "softmax" and not moe.normalizes_top_k,
        moe_router_topk_scaling_factor=moe.scaling_factor if moe.scaling_factor != 1.0 else None,
        moe_router_num_groups=moe.num_groups if has_groups else None,
        moe_router_group_topk=moe.top_groups if has_groups else None,
        moe_router_enable_expert_bias=moe.correction_bias,
        moe_router_bias_update_rate=0.0,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size or None,
        moe_shared_expert_gate=moe.shared_gate,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=fused,
        moe_permute_fusion=fused,
        expert_model_parallel_size=context.ep.size,
        expert_tensor_parallel_size=1,
    )
