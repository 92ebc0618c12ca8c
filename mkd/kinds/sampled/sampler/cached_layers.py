"""Let the layers of a model read and write a cache while it samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mkd.kinds.sampled.sampler.kv_cache import CachedAttention, KVCache
from mkd.kinds.sampled.sampler.recurrent_state import CachedRecurrence
from mkd.models.language_model import LanguageModel


@contextmanager
def cached_layers(parts: Sequence[LanguageModel], cache: KVCache) -> Iterator[None]:
    """Let attention and mixers of all layers of `parts` use `cache` inside the block, in evaluation mode."""
    was_training = [part.training for part in parts]
    replaced = []
    try:
        for part in parts:
            part.eval()
            for layer in part.decoder.layers:
                owner, number = layer.self_attention, layer.layer_number
                shape, scale = part.shape.layers[number - 1], part.config.softmax_scale
                if not shape.mixes_tokens:
                    continue
                name = "core_attention" if shape.has_attention else "recurrence"
                inner = getattr(owner, name)
                replaced.append((owner, name, inner))
                if shape.has_attention:
                    setattr(owner, name, CachedAttention(inner, cache, number, shape.sliding_window, scale))
                else:
                    setattr(owner, name, CachedRecurrence(inner, cache, number))
        yield
    finally:
        for owner, name, inner in replaced:
            setattr(owner, name, inner)
        for part, training in zip(parts, was_training, strict=True):
            part.train(training)
