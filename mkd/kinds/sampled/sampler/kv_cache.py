"""The keys, values and states of earlier tokens, and the attention of one new token of each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PromptRow:
    """A row of whole prompts, of which layers keep what later tokens need."""

    slots: Sequence[int]  # of each prompt
    lengths: Sequence[int]  # tokens of each
    spans: Sequence[int]  # tokens of each with its padding

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield the slot of each prompt, its first token in the row, and the one behind its last."""
        begin = 0
        for slot, length, span in zip(self.slots, self.lengths, self.spans, strict=True):
            yield slot, begin, begin + length
            begin += span


@dataclass(frozen=True)
class TokenRow:
    """A row of one new token for each sequence. Rows beyond the sequences are padding."""

    slots: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the new tokens in their sequences
    longest: int  # largest position + 1
    first: int | None  # the slots are first, first + 1, ...; None: they are scattered

    @property
    def place(self) -> Tensor | slice:
        """The slots as an index; a slice copies nothing."""
        return self.slots if self.first is None else slice(self.first, self.first + len(self.slots))


@dataclass
class KVCache:
    """Keys and values of attention, and states of mixers, for `slots` sequences of up to `length` tokens.

    The layers are those of this process.
    """

    slots: int
    length: int
    row: PromptRow | TokenRow | None = None  # the row that runs through the model
    _stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _states: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, [slots, groups, length, d] each, shaped after those of a row."""
        if number not in self._stored:
            # Zeros, because a weight of 0 times NaN would be NaN.
            self._stored[number] = tuple(
                one.new_zeros(self.slots, one.size(1), self.length, one.size(2)) for one in (key, value)
            )
        return self._stored[number]

    def state(self, number: int, name: str, like: Tensor, *sizes: int) -> Tensor:
        """Return a state of a layer, [slots, *sizes], with the dtype of `like`; at first with any values."""
        if (number, name) not in self._states:
            self._states[number, name] = like.new_empty(self.slots, *sizes)
        return self._states[number, name]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot, and its states, into another one."""
        for stored in self._stored.values():
            for one in stored:
                one[target, :, :length] = one[source, :, :length]
        for state in self._states.values():
            state[target] = state[source]


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
            for slot, begin, end in row.places():
                keys[slot, :, : end - begin] = key[begin:end].transpose(0, 1)
                values[slot, :, : end - begin] = value[begin:end].transpose(0, 1)
            return self.inner(query, key, value, mask, **options)
        assert row is not None, "the decoder says what runs"
        n = len(row.slots)
        if not n:
            return query.new_zeros(query.size(0), query[0].numel())
        keys[row.slots, :, row.positions] = key[:n]
        values[row.slots, :, row.positions] = value[:n]
        keys, values = (one[row.place, :, : row.longest] for one in (keys, values))
        output = self._attend(query[:n], keys, values, row)
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
