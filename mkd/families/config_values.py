"""Kinds of values in a Hugging Face `config.json`: a wrong one is a named error, never a crash later."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mkd.errors import CheckpointError, MkdError, UsageError, raise_all

# The last two: a rope for each layer type.
ROPE_OBJECTS = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
PART_OBJECTS = ("text_config", "vision_config")  # the parts of a model with images


@dataclass(frozen=True)
class Kind:
    """The values that a key of config.json may have."""

    must_be: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


_KINDS = (  # every key that is read, in config.json itself or in its rope parameters
    (
        Kind("a whole number above 0", lambda v: type(v) is int and v > 0),
        "num_hidden_layers hidden_size intermediate_size num_attention_heads vocab_size num_key_value_heads "
        "head_dim max_position_embeddings original_max_position_embeddings sliding_window "
        "global_head_dim num_global_key_value_heads top_k_experts "
        "num_experts rotary_dim num_experts_per_tok moe_intermediate_size "
        "no_rope_layer_interval decoder_sparse_step "
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "n_routed_experts n_group topk_group shared_expert_intermediate_size full_attention_interval "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "linear_conv_kernel_dim moe_latent_size moe_shared_expert_intermediate_size "
        "ssm_state_size mamba_num_heads mamba_head_dim n_groups mamba_n_groups conv_kernel mamba_d_conv "
        "depth num_heads num_channels in_channels image_size patch_size temporal_patch_size "
        "spatial_merge_size window_size scale_factor num_position_embeddings out_hidden_size",
    ),
    (
        Kind("a finite number above 0", _is_number),
        "rms_norm_eps layer_norm_epsilon initializer_range rope_theta rope_local_base_freq "
        "partial_rotary_factor "
        "routed_scaling_factor query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping factor "
        "low_freq_factor high_freq_factor attention_factor beta_fast beta_slow swiglu_alpha swiglu_limit "
        "alpha attention_multiplier embedding_multiplier residual_multiplier logits_scaling",
    ),
    (
        Kind("true or false", lambda v: isinstance(v, bool)),
        "attention_bias mlp_bias tie_word_embeddings use_sliding_window is_causal "
        "norm_topk_prob rope_interleave truncate use_bias "
        "attention_out_bias use_qk_norm attention_k_eq_v enable_moe_block use_conv_bias mamba_conv_bias",
    ),
    (Kind("a list of finite numbers above 0", _list_of(_is_number)), "short_factor long_factor"),
    (
        Kind("a text", _is_text),
        "model_type hidden_act hidden_activation rope_type type scoring_func topk_method "
        "position_embedding_type mlp_hidden_act mamba_hidden_act hybrid_override_pattern",
    ),
    (
        Kind("a whole number of 0 or more, or a text", lambda v: _is_text(v) or _is_count(v)),
        "sliding_window_pattern",
    ),
    (
        Kind("true, false or a text", lambda v: _is_text(v) or isinstance(v, bool)),
        "use_bidirectional_attention",
    ),
    (
        Kind("an object", lambda v: isinstance(v, Mapping)),
        " ".join((*ROPE_OBJECTS, *PART_OBJECTS, "per_layer_config")),
    ),
    (Kind("a list of texts", _list_of(_is_text)), "layer_types layers_block_type mlp_layer_types"),
    (
        Kind("a list of whole numbers of 0 or more", _list_of(_is_count)),
        "mlp_only_layers no_rope_layers fullatt_block_indexes deepstack_visual_indexes mrope_section",
    ),
    (
        Kind("a finite number of 0 or more", _is_amount),
        "time_step_min mamba_dt_min router_jitter_noise mscale mscale_all_dim llama_4_scaling_beta",
    ),
    (
        Kind("a whole number of 0 or more", _is_count),
        "max_window_layers first_k_dense_replace num_nextn_predict_layers num_mtp_layers n_shared_experts "
        "num_local_experts shared_intermediate_size image_token_id "
        "hidden_size_per_layer_input num_kv_shared_layers",
    ),
)
KINDS = {name: kind for kind, names in _KINDS for name in names.split()}


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without the keys that are null, nested objects included."""
    given = ((key, value) for key, value in config.items() if value is not None)
    return {key: without_nulls(value) if isinstance(value, Mapping) else value for key, value in given}


def check_kinds(config: Mapping[str, Any], source: str) -> None:
    """Raise `CheckpointError` for values of another kind than their keys require, all at once.

    `source` names the file.
    """
    raise_all(list(_wrong_kinds(config, source)))


def _wrong_kinds(config: Mapping[str, Any], source: str) -> Iterator[CheckpointError]:
    for name, value in config.items():
        kind = KINDS.get(name)
        if kind is not None and not kind.holds(value):
            what = f"{source}: {name} is {value!r}"
            do = "download or write it again"
            yield CheckpointError(what, f"it must be {kind.must_be}", do, code="model-config-not-valid")
        elif name in ROPE_OBJECTS:
            yield from _wrong_kinds(value, f"{source}: {name}")


def further_problems(
    error: MkdError, config: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]
) -> Iterator[UsageError]:
    """Yield what else is not supported, after `error`: `read` stops at the first problem.

    The key that an error names is left out, and the rest is read again. This ends at any other problem,
    which may come from the missing key, and where a text names no key.
    """
    rest = dict(config)
    while isinstance(error, UsageError) and (named := [key for key in rest if _names(error, key)]):
        del rest[max(named, key=len)]
        try:
            read(rest)
            return
        except KeyError:
            return
        except UsageError as other:
            if other.what != error.what:
                yield other
            error = other
        except CheckpointError:
            return


def _names(error: MkdError, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", error.what) is not None
