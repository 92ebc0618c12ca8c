"""The states of mixers, and inputs of their convolutions, for each sequence that grows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mkd.kinds.sampled.sampler.kv_cache import KVCache, PromptRow, TokenRow
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.recurrence import PackedRecurrence, recurrence_inputs
from mkd.models.mixers.scan import delta_rule_step, gated_delta_rule


class CachedRecurrence(PackedRecurrence):
    """Takes the place of a mixer's operations: prompts leave their states, single tokens update them.

    A prompt replaces all that its slot holds. Rows of padding have no slot: they change no state, and their
    outputs are 0.
    """

    def __init__(self, inner: PackedRecurrence, cache: KVCache, number: int):
        self.inner, self.cache, self.number = inner, cache, number

    def convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None, rows: PackRows) -> Tensor:
        """Return SiLU of the convolution [t, c]; the last k - 1 inputs of each sequence stay."""
        row, (channels, size) = self.cache.row, filters.shape
        inputs = self.cache.state(self.number, "inputs", x, channels, size - 1)
        if isinstance(row, PromptRow):
            for slot, begin, end in row.places():
                last = x[max(begin, end - size + 1) : end].t()
                inputs[slot] = F.pad(last, (size - 1 - last.size(1), 0))
            return self.inner.convolve(x, filters, bias, rows)
        assert row is not None, "the decoder says what runs"
        n = len(row.slots)
        seen = torch.cat((inputs[row.place], x[:n, :, None]), dim=2)
        inputs[row.place] = seen[..., 1:]
        mixed = (seen * filters).sum(-1)
        return F.pad(F.silu(mixed if bias is None else mixed + bias), (0, 0, 0, x.size(0) - n))

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv]; the state behind the last token of each sequence stays."""
        row, states = self.cache.row, self._states(g, k, v)
        if isinstance(row, PromptRow):
            spans = [(begin, end) for _, begin, end in row.places()]
            outputs, states[row.slots] = self.inner.delta_rule_with_states(q, k, v, g, beta, rows, spans)
            return outputs
        n = len(self._token_row.slots)
        inputs = recurrence_inputs(q[:n], k[:n], v[:n])
        return self._step(*inputs, g[:n], beta[:n], states, q.size(0)).to(v.dtype)

    def decayed_sum(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv]; the state behind the last token of each sequence stays."""
        row, states = self.cache.row, self._states(g, k, v)
        if isinstance(row, PromptRow):
            ends = [end - 1 for _, _, end in row.places()]
            outputs, states[row.slots] = gated_delta_rule(q, k, v, g, None, rows.documents, ends)
            return outputs
        n = len(self._token_row.slots)
        return self._step(q[:n], k[:n], v[:n], g[:n], None, states, q.size(0))

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.inner.gated_norm(x, gate, weight, epsilon)

    def _states(self, g: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the states of all slots, [slots, heads, dk, dv] fp32."""
        return self.cache.state(self.number, "state", g, g.size(1), k.size(-1), v.size(-1))

    @property
    def _token_row(self) -> TokenRow:
        assert isinstance(self.cache.row, TokenRow), "the decoder says what runs"
        return self.cache.row

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor, rows: int
    ) -> Tensor:
        """Return the outputs of single tokens, filled up to `rows` rows, and update their states."""
        place = self._token_row.place
        outputs, states[place] = delta_rule_step(q, k, v, g, beta, states[place])
        return F.pad(outputs, (0, 0, 0, 0, 0, rows - q.size(0)))
