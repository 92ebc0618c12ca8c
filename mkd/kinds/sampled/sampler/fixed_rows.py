"""One new token of every slot in rows of few fixed shapes, which GPUs run as CUDA graphs.

A layer of one token is some dozens of small kernels, and starting them takes longer than running them. A
graph starts all kernels of a row at once. Its shapes and addresses are fixed: so a row has one place for
every slot, also for those without a sequence, and reads keys up to a rounded length, behind a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mkd.kinds.sampled.sampler.kv_cache import KVCache, TokenRow
from mkd.kinds.sampled.sampler.pipeline_forward import PipelineForward
from mkd.kinds.sampled.sampler.rollouts import Sampling
from mkd.kinds.sampled.sampler.sampling import barred_columns, sample_tokens
from mkd.losses.lm_head import head_logits
from mkd.losses.softmax import compute_dtype
from mkd.models.graphs.capture import captured, first_cause
from mkd.models.language_model import LanguageModel
from mkd.models.packed import packed_documents
from mkd.parallel.context import ParallelContext

LOG = logging.getLogger("mkd")
LENGTH_STEP = 256  # keys are read up to a multiple of it
WARM_UPS = 2  # runs of a row before its graph is made
ROW_HALVINGS = 4  # rows have all slots, a half, a quarter, an eighth or a sixteenth of them


def run_as_graphs(parts: Sequence[LanguageModel], context: ParallelContext) -> bool:
    """Return True if rows of this model run as CUDA graphs: on one GPU, without experts and mixers.

    Experts wait for the host; messages between processes in a graph have not been tried. The runs before a
    capture would update the states of mixers.
    """
    alone = len(parts) == 1 and context.pp_size == context.tp_size == 1
    return context.platform.is_cuda and alone and parts[0].shape.moe is None and not has_mixers(parts[0])


def has_mixers(part: LanguageModel) -> bool:
    """Return True if a layer of the model has a mixer in place of attention."""
    return any(layer.mixer is not None for layer in part.shape.layers)


@dataclass
class FixedRows:
    """The rows of one phase of sampling. The place in a row is the slot."""

    forward: PipelineForward
    cache: KVCache
    sampling: Sampling
    captures: bool  # False: the same rows without graphs
    may_fall_back: bool = False  # continue without graphs if a row cannot be captured
    _shapes: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph | None, Tensor]] = field(default_factory=dict)
    # The pool of all graphs, and their stream: torch gives unused memory to the stream that had it.
    _memory: tuple[tuple[int, int], torch.cuda.Stream] | None = None

    def __post_init__(self) -> None:
        assert not (self.captures and has_mixers(self.forward.parts[0])), "run_as_graphs says why"
        slots, device = self.cache.slots, self.forward.context.device
        self._inputs = torch.zeros(3, slots, dtype=torch.float64, device=device)  # ids, positions, uniforms
        self._slots = torch.arange(slots, device=device)
        width, group = self.forward.parts[0].head_weight().shape[0], self.forward.context.tp_group
        self._barred = barred_columns(self.sampling.unused_ids, width, group, device)
        self._heights = sorted({-(-slots // 2**i) for i in range(ROW_HALVINGS + 1)})
        # Made here: a graph cannot copy from the host's memory.
        self._borders = {height: self.forward.token_border(height) for height in self._heights}

    def run(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],  # the last one of each sequence
        positions: Sequence[int],  # of these tokens in their sequences
        uniforms: np.ndarray,  # [n] fp64
    ) -> Tensor:
        """Return ids, ln p and entropies of the next tokens, fp64 [3, n], in the order of `slots`."""
        height = next(one for one in self._heights if one > max(slots))
        length = min(-(-(max(positions) + 1) // LENGTH_STEP) * LENGTH_STEP, self.cache.length)
        host = np.zeros((3, height))
        host[:, list(slots)] = tokens, positions, uniforms
        self._inputs[:, :height].copy_(torch.from_numpy(host))
        values = self._replayed(height, length) if self.captures else self._compute(height, length)
        return values[:, self.forward.on_device(np.array(slots))]

    def _replayed(self, height: int, length: int) -> Tensor:
        """Return the result of a graph, which its next replay overwrites."""
        try:
            graph, values = self._captured(height, length)
        except RuntimeError as error:
            if not self.may_fall_back:
                raise
            LOG.warning("sampling continues without CUDA graphs: %s", first_cause(error))
            self.captures = False
            return self._compute(height, length)
        graph.replay()
        return values

    def _captured(self, height: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return the graph of a shape and its result."""
        key = height, length
        if key not in self._shapes:
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            pool, side = self._memory
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries choose kernels and make their work spaces now
                for _ in range(WARM_UPS):
                    self._compute(height, length)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a capture cannot take memory that torch keeps unused
            with captured(pool, side, generators=[]) as graph:
                values = self._compute(height, length)
            self._shapes[key] = graph, values
        found, values = self._shapes[key]
        assert found is not None
        return found, values

    def _compute(self, height: int, length: int) -> Tensor:
        """Run the rows of the first `height` slots; nothing here may wait for the device."""
        forward, model = self.forward, self.forward.parts[0]
        tokens, positions = self._inputs[:2, :height].long()
        self.cache.row = TokenRow(self._slots[:height], positions, length, first=0)
        packed = packed_documents(self._borders[height], self._borders[height], height)
        packed.token_positions = positions
        hidden = forward.run(tokens, packed, slice(None))
        assert hidden is not None, "one stage"
        sampled = sample_tokens(
            head_logits(hidden, model.head_weight(), compute_dtype(hidden), model.shape.logits_cap),
            self._inputs[2, :height],
            temperature=self.sampling.temperature,
            vocab_size=self.sampling.vocab_size,
            barred=self._barred,
            top_p=self.sampling.top_p,
            tp_group=forward.context.tp_group,
        )
        return torch.stack([sampled.ids.double(), sampled.logp, sampled.entropy])
