"""GLM-4.7-Flash: DeepSeek-V3's layers, of which config.json names those with experts.

The layer for multi-token prediction is not trained: an export copies it.
"""

from __future__ import annotations

from mkd.errors import CheckpointError
from mkd.families.experts.deepseek_v3 import DEEPSEEK_V3, latent_layers
from mkd.families.family import Family, HFConfig
from mkd.families.layer_shape import LayerShape

KINDS_OF_MLP = ("dense", "sparse")


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    num_layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    if len(kinds) != num_layers or not set(kinds) <= set(KINDS_OF_MLP):
        what = f"mlp_layer_types names {len(kinds)} layers ({', '.join(sorted(set(kinds)))}), "
        what += f"num_hidden_layers is {num_layers}"
        why = f"each layer must be {' or '.join(KINDS_OF_MLP)}"
        raise CheckpointError(what, why, "download or write it again", code="model-config-not-valid")
    return latent_layers(config, [kind == "sparse" for kind in kinds])


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    _read_layers,
    DEEPSEEK_V3.tensors,
    defaults={
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    read_model=DEEPSEEK_V3.read_model,
)
