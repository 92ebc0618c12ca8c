"""Run a row of tokens through the pipeline, outside of the training schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments
from mkd.parallel.context import ParallelContext
from mkd.parallel.zigzag import RowShard


class _Sends:
    """Messages on their way, which must not be freed."""

    def __init__(self) -> None:
        self._open: list[tuple[dist.Work, Tensor]] = []

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        self._open = [one for one in self._open if not one[0].is_completed()]
        self._open.append((work, tensor))

    def wait(self) -> None:
        for work, _ in self._open:
            work.wait()


@dataclass
class PipelineForward:
    """Runs rows through all stages; each stage sends its hidden states to the next."""

    parts: Sequence[LanguageModel]  # the model on this rank, by virtual stage
    context: ParallelContext
    _sends: _Sends = field(default_factory=_Sends)

    def run(self, tokens: Tensor, packed: PackedDocuments, rows: list[int] | slice) -> Tensor | None:
        """Run a row through all stages; return the final hidden states [n, h] of `rows`, or None elsewhere.

        Ranks of the last stage have the result. `rows` count the row's tokens.
        """
        context = self.context
        config = self.parts[0].config
        shards = context.tp_size if config.sequence_parallel else 1
        positions = _positions(tokens.numel(), packed)[None]
        for part in self.parts:
            if not part.pre_process:
                size = tokens.numel() // shards, 1, config.hidden_size
                received = torch.empty(size, dtype=config.params_dtype, device=context.device)
                dist.recv(received, self._rank_of(context.pp_rank - 1), group=context.pp_group)
                part.set_input_tensor(received)
            hidden = part(tokens[None], positions, packed_seq_params=packed)
            part.set_input_tensor(None)
            if not part.post_process:
                target = self._rank_of(context.pp_rank + 1)
                hidden = hidden.contiguous()
                self._sends.add(dist.isend(hidden, target, group=context.pp_group), hidden)
        if not self.parts[-1].post_process:
            return None
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=context.tp_group)
        return hidden[rows, 0]

    def finish(self) -> None:
        """Wait until all messages have left."""
        self._sends.wait()

    def token_border(self, tokens: int) -> Tensor:
        """Return the borders of a row of single tokens, which counts as one document, int32 [2].

        Unless a kernel reads them, they stay on the host: Megatron's rotation asks for their values.
        """
        on_device = self.parts[0].config.apply_rope_fusion
        device = self.context.device if on_device else torch.device("cpu")
        return torch.tensor([0, tokens], dtype=torch.int32, device=device)

    def missing(self, tokens: int) -> int:
        """Return the padding of a row: sequence parallelism divides it over the tensor-parallel ranks."""
        return -tokens % (self.context.tp_size if self.parts[0].config.sequence_parallel else 1)

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.context.pp_group, stage % self.context.pp_size)

    @property
    def last_rank(self) -> int:
        """Global rank of the last stage."""
        return self._rank_of(-1)

    def on_device(self, values: np.ndarray) -> Tensor:
        """Return the values on the device of this rank."""
        return torch.from_numpy(values).to(self.context.device)


def _positions(tokens: int, packed: PackedDocuments) -> Tensor:
    """Return the position of each token in its text, int64 [t]. Models with images turn by them."""
    if packed.token_positions is not None:
        return packed.token_positions
    return RowShard().places(packed.cu_seqlens_q_padded, tokens)[1].long()
