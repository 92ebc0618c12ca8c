"""`MoEShape` -> the switches of Megatron's `TransformerConfig`."""

from __future__ import annotations

from typing import Any

from mkd.parallel.context import ParallelContext
from mkd.plan.model_shape import ModelShape


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
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=fused,
        moe_permute_fusion=fused,
        expert_model_parallel_size=context.ep.size,
        expert_tensor_parallel_size=1,
    )
