"""Keys of config.json that mkd does not read for a model, although they look as if they had an effect."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mkd.families.config_values import KINDS, without_nulls

LIKENESS = 0.9  # of a misspelt key and the one that is meant: num_key_value_head, tie_word_embedding
_CHANGE_THE_MODEL = (
    "attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar attention_multiplier "
    "embedding_multiplier residual_multiplier logits_scaling attention_bias mlp_bias use_qk_norm "
    "sliding_window layer_types no_rope_layers rope_local_base_freq kv_lora_rank q_lora_rank"
)
"""Keys that some families read; in others transformers ignores them, too."""
_SWITCH = "use_sliding_window"  # of Qwen: windows and layer types behind it may stand there unused


class _ReadKeys(dict[str, Any]):
    """A configuration that remembers which of its keys were asked for. A copy asks for all of them."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.asked.update(self.keys())
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return {**dict(self), **other}


def unread_keys(
    config: Mapping[str, Any], defaults: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]
) -> Iterator[str]:
    """Yield `KEY VALUE` of keys without effect, for misspelt ones with the key that is meant.

    `read` reads a model from a configuration, with the family's `defaults`. Values that say that a model does
    nothing special (false, 0, a factor of 1) are left out.
    """
    given = without_nulls(config)
    watched = _ReadKeys({**defaults, **given})
    read(watched)
    missing = watched.asked - set(given)
    for key, value in given.items():
        if key in watched.asked or key.startswith("_"):
            continue
        if key in _CHANGE_THE_MODEL.split():
            is_switched_off = key in ("sliding_window", "layer_types") and _SWITCH in watched
            if value and value != 1 and not is_switched_off:
                yield f"{key} {_brief(value)}"
        elif key not in KINDS and (near := difflib.get_close_matches(key, missing, n=1, cutoff=LIKENESS)):
            yield f"{key} {_brief(value)} (did you mean {near[0]}?)"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:36] + " ..."
