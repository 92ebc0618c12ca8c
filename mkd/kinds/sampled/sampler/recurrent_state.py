"""The states of mixers, and inputs of their convolutions, for each sequence that grows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mkd.kinds.sampled.sampler.kv_cache import KVCache, PromptRow
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.recurrence import PackedRecurrence
from mkd.models.mixers.scan import delta_rule_step, gated_delta_rule


class CachedRecurrence(PackedRecurrence):
    """Takes the place of a mixer's operations: prompts leave their states, single tokens update them.

    A prompt replaces all that its slot holds. Rows of padding have no slot: they change no state, and their
    outputs are 0.
    """

    def __init__(self, cache: KVCache, number: int):
        self.cache, self.number = cache, number

    def convolve(self, x: Tensor, filters: Tensor, rows: PackRows) -> Tensor:
        """Return the convolution [t, c]; the last k - 1 inputs of each sequence stay."""
        row, (channels, size) = self.cache.row, filters.shape
        inputs = self.cache.state(self.number, "inputs", x, channels, size - 1)
        if isinstance(row, PromptRow):
            for slot, begin, end in row.places():
                last = x[max(begin, end - size + 1) : end].t()
                inputs[slot] = F.pad(last, (size - 1 - last.size(1), 0))
            return super().convolve(x, filters, rows)
        assert row is not None, "the decoder says what runs"
        n = len(row.slots)
        seen = torch.cat((inputs[row.place], x[:n, :, None]), dim=2)
        inputs[row.place] = seen[..., 1:]
        return F.pad((seen * filters).sum(-1), (0, 0, 0, x.size(0) - n))

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv]; the state behind the last token of each sequence stays."""
        return self._run(q, k, v, g, beta, rows)

    def decayed_sum(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv]; the state behind the last token of each sequence stays."""
        return self._run(q, k, v, g, None, rows)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, rows: PackRows) -> Tensor:
        row, heads = self.cache.row, g.size(1)
        states = self.cache.state(self.number, "state", v, heads, k.size(-1), v.size(-1))
        if isinstance(row, PromptRow):
            ends = [end - 1 for _, _, end in row.places()]
            outputs, states[row.slots] = gated_delta_rule(q, k, v, g, beta, rows.documents, ends)
            return outputs
        assert row is not None, "the decoder says what runs"
        n = len(row.slots)
        strengths = None if beta is None else beta[:n]
        outputs, states[row.place] = delta_rule_step(q[:n], k[:n], v[:n], g[:n], strengths, states[row.place])
        return F.pad(outputs, (0, 0, 0, 0, 0, q.size(0) - n))
