"""The keys and values of earlier tokens, and the attention of one new token of each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkd.models.language_model import LanguageModel


@dataclass(frozen=True)
class PromptRow:
    """A row of whole prompts, whose keys and values are stored."""

    slots: Sequence[int]  # of each prompt
    lengths: Sequence[int]  # tokens of each
    spans: Sequence[int]  # tokens of each with its padding


@dataclass(frozen=True)
class TokenRow:
    """A row of one new token for each sequence. Rows beyond the sequences are padding."""

    slots: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the new tokens in their sequences
    longest: int  # largest position + 1
    first: int | None  # the slots are first, first + 1, ...; None: they are scattered


@dataclass
class KVCache:
    """Keys and values of the layers of this process, for `slots` sequences of up to `length` tokens."""

    slots: int
    length: int
    row: PromptRow | TokenRow | None = None  # the row that runs through the model
    _stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, [slots, groups, length, d] each, shaped after those of a row."""
        if number not in self._stored:
            # Zeros, because a weight of 0 times NaN would be NaN.
            self._stored[number] = tuple(
                one.new_zeros(self.slots, one.size(1), self.length, one.size(2)) for one in (key, value)
            )
        return self._stored[number]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot into another one."""
        for stored in self._stored.values():
            for one in stored:
                one[target, :, :length] = one[source, :, :length]


class CachedAttention(nn.Module):
    """Takes the place of a core attention: prompts pass it and are stored, single tokens read the cache."""

    def __init__(
        self, inner: nn.Module, cache: KVCache, number: int, window: int | None, scale: float | None
    ):
        super().__init__()
        self.inner, self.cache, self.number = inner, cache, number
        self.window, self.scale = window, scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, /, **options: Any
    ) -> Tensor:
        """Return the output [t, heads * d] of queries [t, heads, d], and keys and values [t, groups, d]."""
        row = self.cache.row
        keys, values = self.cache.layer(self.number, key, value)
        if isinstance(row, PromptRow):
            parts = zip(row.slots, row.lengths, key.split(row.spans), value.split(row.spans), strict=True)
            for slot, length, k, v in parts:
                keys[slot, :, :length] = k[:length].transpose(0, 1)
                values[slot, :, :length] = v[:length].transpose(0, 1)
            return self.inner(query, key, value, mask, **options)
        assert row is not None, "the decoder says what runs"
        n = len(row.slots)
        if not n:
            return query.new_zeros(query.size(0), query[0].numel())
        keys[row.slots, :, row.positions] = key[:n]
        values[row.slots, :, row.positions] = value[:n]
        which = row.slots if row.first is None else slice(row.first, row.first + n)
        output = self._attend(query[:n], keys[which, :, : row.longest], values[which, :, : row.longest], row)
        return F.pad(output, (0, 0, 0, query.size(0) - n))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, row: TokenRow) -> Tensor:
        """Return [n, heads * d]. The heads of a group count as queries of one sequence: no key is copied."""
        n, groups = keys.shape[:2]
        distance = row.positions[:, None] - torch.arange(row.longest, device=keys.device)
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        output = F.scaled_dot_product_attention(
            query.unflatten(1, (groups, -1)), keys, values, attn_mask=seen[:, None, None], scale=self.scale
        )
        return output.flatten(1)


@contextmanager
def cached_attention(parts: Sequence[LanguageModel], cache: KVCache) -> Iterator[None]:
    """Let the attention of all layers of `parts` use `cache` inside the block, in evaluation mode."""
    layers = [(part, layer) for part in parts for layer in part.decoder.layers]
    was_training = [part.training for part in parts]
    inner = [layer.self_attention.core_attention for _, layer in layers]
    try:
        for (part, layer), attention in zip(layers, inner, strict=True):
            number, scale = layer.layer_number, part.config.softmax_scale
            window = part.shape.layers[number - 1].sliding_window
            layer.self_attention.core_attention = CachedAttention(attention, cache, number, window, scale)
        for part in parts:
            part.eval()
        yield
    finally:
        for (_, layer), attention in zip(layers, inner, strict=True):
            layer.self_attention.core_attention = attention
        for part, training in zip(parts, was_training, strict=True):
            part.train(training)
