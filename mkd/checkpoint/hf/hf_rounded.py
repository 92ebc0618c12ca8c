"""The rounded matrices of a student: in its model parts, and in the files of its export.

Files hold the codes of the exact weights, rounded once more. That gives the weights of training: rounding is
a function of the weights in the model's dtype, and never starts from rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_weights import map_part, stored_tensors
from mkd.checkpoint.rounded_runs import ROUNDING
from mkd.config.rounding_formats import ROW, Rounding
from mkd.families.weight_rules import EMBEDDING, LM_HEAD
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.rounded_tensors import is_matrix
from mkd.rounding import stored_matrix
from mkd.rounding.rounded_matrix import round_in_place, shared_peak

PEAKS, CALIBRATED = "input_peaks", "is_calibrated"  # keys of the entry ROUNDING, if inputs are rounded
NO_PEAKS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class RoundedMatrix:
    """One parameter of this rank."""

    name: str  # of the parameter in its model part
    first_layer: int  # of the part
    weight: Tensor  # [out, in]
    tensors: tuple[str, ...]  # Hugging Face names of its parts
    cuts_rows: bool  # tensor-parallel ranks hold other columns
    shares_peak: bool  # tensor-parallel ranks hold other parts of what the peak is about


class RoundedWeights:
    """The matrices of this rank's model parts that are rounded. All ranks of a stage have the same ones."""

    def __init__(
        self,
        model_parts: Sequence[tuple[nn.Module, int]],  # each with the model's index of its layer 0
        shape: ModelShape,
        rounding: Rounding,
        context: ParallelContext,
    ):
        self.rounding, self._context = rounding, context
        self.matrices = [
            one for part, first in model_parts for one in _matrices(part, first, shape, rounding, context)
        ]

    @torch.no_grad()
    def round(self) -> None:
        """Round all matrices in place. They must hold exact weights. Collective over tensor parallelism."""
        for matrix, peak in zip(self.matrices, self._peaks(), strict=True):
            round_in_place(matrix.weight, self.rounding, peak)

    def tensor_peaks(self) -> dict[str, float]:
        """Return Hugging Face name -> largest magnitude of the matrix that training rounds with it.

        Parts of one parameter share it. {} unless the format needs it. Collective over all ranks.
        """
        if not self.rounding.kind.has_tensor_scale:
            return {}
        own = {
            name: float(peak)
            for matrix, peak in zip(self.matrices, self._peaks(), strict=True)
            for name in matrix.tensors
            if peak is not None
        }
        every: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return {name: peak for one in every for name, peak in one.items()}

    def _peaks(self) -> list[Tensor | None]:
        """Return the peak of each matrix. All-reduce MAX over tensor parallelism, which is exact."""
        peaks = [shared_peak(matrix.weight.detach(), self.rounding) for matrix in self.matrices]
        pairs = zip(self.matrices, peaks, strict=True)
        shared = [peak for matrix, peak in pairs if peak is not None and matrix.shares_peak]
        if shared:
            joined = torch.cat([peak.flatten() for peak in shared])
            dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=self._context.tp_group)
            for peak, common in zip(shared, joined.split([one.numel() for one in shared]), strict=True):
                peak.copy_(common.view_as(peak))
        return peaks


def _matrices(
    part: nn.Module, first_layer: int, shape: ModelShape, rounding: Rounding, context: ParallelContext
) -> Iterator[RoundedMatrix]:
    parameters = stored_tensors(part)
    for name, bound in map_part(parameters, shape, first_layer, context).items():
        if not is_matrix(name) or any(map(rounding.excludes, bound.tensors)):
            continue
        is_cut = context.tp_size > 1 and not bound.is_replicated
        crosses = rounding.kind.has_tensor_scale or (rounding.group == ROW and bound.entry.rule.dim == 1)
        tensors, cuts_rows = tuple(dict.fromkeys(bound.tensors)), is_cut and bound.entry.rule.dim == 1
        yield RoundedMatrix(name, first_layer, parameters[name], tensors, cuts_rows, is_cut and crosses)


@dataclass(frozen=True)
class RoundedFiles:
    """The way in which an export stores rounded matrices, the same on all ranks."""

    rounding: Rounding
    tensors: frozenset[str]  # Hugging Face names of the matrices that are rounded
    peaks: Mapping[str, float] = field(default_factory=dict)  # see `RoundedWeights.tensor_peaks`
    input_peaks: Mapping[str, float] = field(
        default_factory=dict
    )  # Hugging Face name -> largest magnitude of the inputs

    @classmethod
    def of(
        cls,
        model_parts: Sequence[tuple[nn.Module, int]],
        shape: ModelShape,
        rounding: Rounding,
        context: ParallelContext,
        input_peaks: Mapping[str, float] = NO_PEAKS,
    ) -> RoundedFiles:
        """Return the files of a model whose parts hold exact weights. Collective over all ranks."""
        weights = RoundedWeights(model_parts, shape, rounding, context)
        own = {name for matrix in weights.matrices for name in matrix.tensors}
        every: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(every, own)
        tensors = frozenset(name for one in every for name in one)
        return cls(rounding, tensors, weights.tensor_peaks(), input_peaks)

    @classmethod
    def of_entry(
        cls,
        model_parts: Sequence[tuple[nn.Module, int]],
        shape: ModelShape,
        state: Mapping[str, Any],  # with the entry ROUNDING of a rounded student
        context: ParallelContext,
    ) -> RoundedFiles | None:
        """Return the files as a checkpoint's mkd.json describes them; None if nothing is rounded.

        Collective. A run that has not finished its calibration rounds no inputs yet, and neither does its
        export.
        """
        if ROUNDING not in state:
            return None
        entry = state[ROUNDING]
        rounding, peaks = Rounding.from_json(entry), entry.get(PEAKS, {})
        if rounding.inputs and rounding.kind.is_calibrated and not entry.get(CALIBRATED):
            rounding = replace(rounding, inputs=False)
        return cls.of(model_parts, shape, rounding, context, peaks)

    def headers(self, name: str, full: tuple[int, ...]) -> dict[str, stored_matrix.Stored]:
        """Return the tensors that take the place of `name`; {} if it stays as it is."""
        if name not in self.tensors:
            return {}
        rows, columns = full
        return stored_matrix.stored_headers(name, (rows, columns), self.rounding)

    def encode(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return what is stored of a tensor on the CPU, in the order of `headers`."""
        if name not in self.tensors:
            return [tensor]
        if self.rounding.kind.has_tensor_scale:
            peak = torch.tensor([self.peaks[name]])
        else:
            peak = shared_peak(tensor, self.rounding)
        return stored_matrix.stored_tensors(tensor, self.rounding, peak, self.input_peaks.get(name, 0.0))

    def configuration(self, sources: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return `quantization_config` of a model with these tensors. It names what is not rounded."""
        kept = (
            name.removesuffix(".weight")
            for name, full in sources.items()
            if name.endswith(".weight") and len(full) == 2 and name not in self.tensors
        )
        head = LM_HEAD.removesuffix(".weight")
        ignored = dict.fromkeys((head, *(name for name in kept if f"{name}.weight" != EMBEDDING)))
        return stored_matrix.quantisation_config(self.rounding, list(ignored))
