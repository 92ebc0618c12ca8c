"""Define tiny models of the families that are in `tests/families/test_further_families.py`."""

from __future__ import annotations

_HEADS = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)  # 3 groups are padded to 4 at TP 2
_GROUPS = dict(num_attention_heads=6, num_key_value_heads=3)
_GROWING = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
_GROWING |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)
_FACTORS = dict(embedding_multiplier=3.0, attention_multiplier=0.2)
_FACTORS |= dict(residual_multiplier=0.3, logits_scaling=0.7)
_THREE_OF_FOUR = 3 * ["sliding_attention"] + ["full_attention"]
_YARN = dict(rope_type="yarn", rope_theta=1e3, factor=8.0, original_max_position_embeddings=32, beta_fast=4.0)
_OLMO_ROPES = dict(full_attention=_YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4))
_PROPORTIONAL = dict(rope_type="proportional", rope_theta=1e3, partial_rotary_factor=0.25)
_GEMMA_ROPES = dict(full_attention=_PROPORTIONAL, sliding_attention=dict(rope_type="default", rope_theta=1e2))
_ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1)
_ROUTED |= dict(routed_scaling_factor=1.5, n_group=1, topk_group=1)
_LATENTS = dict(num_attention_heads=3, num_key_value_heads=3, q_lora_rank=20, kv_lora_rank=12)
_LATENTS |= dict(qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=6)
_MAMBA = dict(mamba_num_heads=8, mamba_head_dim=6, ssm_state_size=10, n_groups=4, chunk_size=16)
_ONE_BY_ONE = ["linear_attention", "mlp", "full_attention", "linear_attention"]
_MAMBA |= dict(time_step_min=0.02)  # some steps are below it
# `pad_token_id=None`: transformers drops the gradient of this token's embedding, mkd does not. A small
# `rope_theta` turns all channels: where none turns, softmax does not see the bias of keys.

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
    "smollm3": (
        "SmolLM3",
        dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=None, no_rope_layers=[1, 0, 1, 0])
        | dict(use_sliding_window=True, sliding_window=12),
    ),
    "ministral3": ("Ministral3", dict(**_HEADS, pad_token_id=None, rope_parameters=_GROWING)),
    "granite": ("Granite", dict(**_GROUPS, **_FACTORS)),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        dict(**_GROUPS, **_FACTORS, num_local_experts=0, layer_types=4 * ["full_attention"])
        | dict(
            mamba_n_heads=4, shared_intermediate_size=96, position_embedding_type="rope", attention_bias=True
        ),
    ),
    "granitemoehybrid-nope": (
        "GraniteMoeHybrid",
        dict(**_GROUPS, **_FACTORS, num_local_experts=0, layer_types=4 * ["full_attention"])
        | dict(mamba_n_heads=4, shared_intermediate_size=96, tie_word_embeddings=True),
    ),
    "olmo3": (
        "Olmo3",
        dict(num_attention_heads=6, num_key_value_heads=2, sliding_window=12, rope_parameters=_OLMO_ROPES)
        | dict(pad_token_id=None, layer_types=_THREE_OF_FOUR),
    ),
    "olmo3-padded": (  # the norms over all heads must not count the groups of padding
        "Olmo3",
        dict(**_GROUPS, pad_token_id=None, layer_types=4 * ["full_attention"], rope_parameters=_OLMO_ROPES),
    ),
    "exaone4": (
        "Exaone4",
        dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=12, layer_types=_THREE_OF_FOUR),
    ),
    "exaone4-full": (  # EXAONE-4.0-1.2B
        "Exaone4",
        dict(**_GROUPS, sliding_window=None, layer_types=4 * ["full_attention"], tie_word_embeddings=True),
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        dict(**_HEADS, pad_token_id=None, attention_bias=True)
        | dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10.0, alpha=5.0, factor=1.0)),
    ),
    "ernie4_5": (
        "Ernie4_5",
        dict(**_HEADS, pad_token_id=None, use_bias=True)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        dict(**_HEADS, num_local_experts=8, num_experts_per_tok=2, intermediate_size=24)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    ),
    "gemma4": (  # 3 groups of full attention are padded to 4 at TP 2, those of windows are not
        "Gemma4",
        dict(num_attention_heads=6, num_key_value_heads=2, head_dim=8, sliding_window=12)
        | dict(attention_k_eq_v=True, num_global_key_value_heads=3, global_head_dim=16)
        | dict(layer_types=_THREE_OF_FOUR, hidden_size_per_layer_input=0, pad_token_id=None)
        | dict(final_logit_softcapping=3.0, rope_parameters=_GEMMA_ROPES),
    ),
    "gemma4-experts": (  # Gemma 4 26B-A4B
        "Gemma4",
        dict(num_attention_heads=6, num_key_value_heads=2, head_dim=8, sliding_window=12)
        | dict(attention_k_eq_v=True, num_global_key_value_heads=2, global_head_dim=16)
        | dict(layer_types=_THREE_OF_FOUR, hidden_size_per_layer_input=0, pad_token_id=None)
        | dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24)
        | dict(final_logit_softcapping=3.0, rope_parameters=_GEMMA_ROPES),
    ),
    "gemma4-values": (  # full attention with values of its own, many key/value heads, and no bound of logits
        "Gemma4",
        dict(num_attention_heads=6, num_key_value_heads=2, head_dim=8, sliding_window=12, global_head_dim=12)
        | dict(layer_types=_THREE_OF_FOUR, hidden_size_per_layer_input=0, pad_token_id=None)
        | dict(tie_word_embeddings=False, rope_parameters=_GEMMA_ROPES),
    ),
    "nemotron_h": ("NemotronH", dict(**_HEADS, **_MAMBA, layers_block_type=_ONE_BY_ONE)),
    "nemotron_h-experts": (
        "NemotronH",
        dict(**_HEADS, **_MAMBA, **_ROUTED, moe_shared_expert_intermediate_size=20, moe_latent_size=12)
        | dict(layers_block_type=["linear_attention", "moe", "moe", "full_attention"]),
    ),
    "nemotron_h-nano": (  # Nemotron 3 Nano, whose experts see the hidden states
        "NemotronH",
        dict(**_HEADS, **_MAMBA, **_ROUTED, moe_shared_expert_intermediate_size=20)
        | dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp"]),
    ),
    "apertus": (
        "Apertus",
        dict(**_HEADS, pad_token_id=None, attention_bias=True)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    ),
    "seed_oss": ("SeedOss", dict(**_HEADS, pad_token_id=None)),
}
RENAMED = {"kimi_k2": "deepseek_v3"}  # the model_type by which transformers knows the architecture
