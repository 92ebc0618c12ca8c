"""Define tiny models of the families that are in `tests/families/test_further_families.py`."""

from __future__ import annotations

_HEADS = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)  # 3 groups are padded to 4 at TP 2
_ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1)
_ROUTED |= dict(routed_scaling_factor=1.5, n_group=1, topk_group=1)
_LATENTS = dict(num_attention_heads=3, num_key_value_heads=3, q_lora_rank=20, kv_lora_rank=12)
_LATENTS |= dict(qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=6)
# `pad_token_id=None`: transformers drops the gradient of this token's embedding, mkd does not.

FURTHER = {  # name: (prefix of transformers' classes, options)
    "glm4_moe": (  # GLM-4.6
        "Glm4Moe",
        dict(**_HEADS, **_ROUTED, first_k_dense_replace=1, num_mtp_layers=0)
        | dict(attention_bias=True, use_qk_norm=True),
    ),
    "glm4_moe-air": (
        "Glm4Moe",
        dict(**_HEADS, **_ROUTED, first_k_dense_replace=2, num_mtp_layers=0, attention_bias=True),
    ),
    "glm4_moe_lite": ("Glm4MoeLite", dict(**_LATENTS, **_ROUTED)),
    "kimi_k2": ("DeepseekV3", dict(**_LATENTS, **_ROUTED, first_k_dense_replace=1, num_mtp_layers=0)),
    "seed_oss": ("SeedOss", dict(**_HEADS, pad_token_id=None)),
}
RENAMED = {"kimi_k2": "deepseek_v3"}  # the model_type by which transformers knows the architecture
