"""Round the inputs of a student's rounded matrices, after a calibration where the format needs one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_rounded import CALIBRATED, PEAKS, RoundedMatrix
from mkd.config.rounding_formats import Rounding
from mkd.models.language_model import LanguageModel
from mkd.models.moe.token_documents import token_documents
from mkd.parallel.context import ParallelContext
from mkd.rounding.rounded_inputs import RoundInputs, token_peak

BATCHES = "calibrated_batches"  # of the entry in mkd.json


@dataclass
class RoundedInputs:
    """The inputs of all rounded matrices of this rank.

    NVFP4 needs the largest magnitude of each input. The first global batches only measure it, with exact
    inputs; from then on it never changes. Otherwise early batches would be rounded with other scales than
    late ones. Evaluations do not measure.
    """

    rounding: Rounding
    context: ParallelContext
    num_batches: int  # of the calibration
    seen: int = 0  # global batches so far
    peaks: dict[str, Tensor] = field(default_factory=dict)  # first Hugging Face name of a matrix -> fp32 [1]
    measured: dict[str, Tensor] = field(default_factory=dict)  # the same of the present step on this rank
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # -> all names of the matrix
    is_real: Tensor | None = None  # bool [t], of the pack in the present layer: False for padding

    @classmethod
    def attach(
        cls,
        parts: Sequence[LanguageModel],
        matrices: Sequence[RoundedMatrix],
        rounding: Rounding,
        context: ParallelContext,
        num_batches: int,
    ) -> RoundedInputs:
        """Let the linear layers of the model parts round their inputs."""
        inputs = cls(rounding, context, num_batches)
        by_weight = {id(matrix.weight): matrix for matrix in matrices}
        for part in parts:
            for layer in part.decoder.layers if rounding.kind.is_calibrated else ():
                layer.register_forward_pre_hook(inputs._enter_layer, with_kwargs=True)
            for module in part.decoder.modules():
                matrix = by_weight.get(id(getattr(module, "weight", None)))
                if matrix is not None:
                    name = matrix.tensors[0]
                    inputs.names[name] = matrix.tensors
                    if rounding.kind.is_calibrated:
                        inputs.peaks[name] = torch.zeros(1, device=context.device)
                        inputs.measured[name] = torch.zeros(1, device=context.device)
                    module.register_forward_pre_hook(partial(inputs._before, name, matrix.cuts_rows))
        return inputs

    @property
    def is_calibrated(self) -> bool:
        """True if inputs are rounded."""
        return not self.rounding.kind.is_calibrated or self.seen >= self.num_batches

    def _measures(self, module: nn.Module) -> bool:
        return not self.is_calibrated and module.training and torch.is_grad_enabled()

    def _enter_layer(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note which tokens are real, also when a layer is recomputed: a hook in front of its forward.

        Padding differs from layout to layout.
        """
        if self._measures(layer):
            hidden, shards = named.get("hidden_states", given[0] if given else None), 1
            assert hidden is not None, "a layer has hidden states"
            if layer.config.sequence_parallel:
                shards = self.context.tp_size
            tokens = hidden.size(0) * shards
            documents = token_documents(named["packed_seq_params"], tokens, self.context, False)
            self.is_real = documents[:tokens] >= 0

    def _before(self, name: str, cuts_rows: bool, module: nn.Module, given: tuple[Any, ...]) -> Any:
        """Return the input of a linear layer, rounded: a hook in front of its forward."""
        x = given[0]
        if self.rounding.kind.is_calibrated:
            if not self.is_calibrated:
                if self._measures(module):
                    self._measure(name, x.detach())
                return None
            peak = self.peaks[name]
        else:
            peak = token_peak(x)
            if cuts_rows:  # every process has a part of a token's channels
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.context.tp_group)
        return RoundInputs.apply(x, self.rounding.format, peak), *given[1:]

    def _measure(self, name: str, x: Tensor) -> None:
        """Keep the largest magnitude of the real tokens of x [t(/tp), 1, channels]."""
        assert self.is_real is not None, "a linear layer is in a decoder layer"
        is_real = self.is_real
        if x.size(0) < len(is_real):  # sequence parallelism
            is_real = is_real.chunk(self.context.tp_size)[self.context.tp_rank]
        peak = token_peak(x).flatten().masked_fill(~is_real, 0.0).amax().float()
        self.measured[name].copy_(torch.maximum(self.measured[name], peak))

    def finish_step(self, is_applied: bool) -> None:
        """Count a global batch, unless its update was skipped. All-reduce MAX over all ranks of the stage."""
        if self.is_calibrated:
            return
        if is_applied and self.measured:
            joined = torch.cat(list(self.measured.values()))
            for group in (self.context.tp_group, self.context.copies_group):
                dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=group)
            for peak, found in zip(self.peaks.values(), joined.split(1), strict=True):
                peak.copy_(torch.maximum(peak, found))
        self.seen += is_applied
        for one in self.measured.values():
            one.zero_()

    def entry(self) -> dict[str, object]:
        """Return what a checkpoint keeps (JSON). Collective over all ranks."""
        own = {name: float(peak) for first, peak in self.peaks.items() for name in self.names[first]}
        every: list[dict[str, float]] = [{}] * self.context.world_size
        dist.all_gather_object(every, own)
        peaks = {name: peak for one in every for name, peak in one.items()}
        return {PEAKS: peaks, BATCHES: self.seen, CALIBRATED: self.is_calibrated}

    def load(self, entry: Mapping[str, Any]) -> None:
        """Continue from the entry of a checkpoint."""
        self.seen = entry.get(BATCHES, 0)
        for name, peak in self.peaks.items():
            peak.fill_(entry.get(PEAKS, {}).get(name, 0.0))
