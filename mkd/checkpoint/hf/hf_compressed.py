"""Matrices that compressed-tensors stores as codes and scales, dequantised slice by slice.

The formats are those of mkd's own rounded students (`mkd/rounding/stored_matrix.py`). Only weights are read:
a model whose inputs are rounded, too, runs with exact inputs here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_names import Cut
from mkd.config.rounding_formats import FORMATS, ROW, Rounding
from mkd.errors import CheckpointError
from mkd.rounding.stored_matrix import (
    GLOBAL,
    INPUT_GLOBAL,
    LAYOUTS,
    PACKED,
    SCALE,
    SHAPE,
    elements_of_code,
    layout_of,
    numbers_of,
)

LOG = logging.getLogger("mkd")
ReadStored = Callable[[str, Cut], Tensor]  # (tensor on disk, cut) -> that part of it
WEIGHT = ".weight"
METHOD = "compressed-tensors"


@dataclass(frozen=True)
class CompressedMatrix:
    """A matrix [out, in] of codes, with scales for groups of its rows."""

    stored: tuple[str, ...]  # names on disk: codes, scales, then those that `read` may need
    shape: tuple[int, int]
    rounding: Rounding

    def read(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        """Return the part `cut`, fp32 [rows, columns]."""
        rows, columns = (range(*part.indices(size)) for part, size in zip(cut, self.shape, strict=True))
        unit, block_rows = elements_of_code(self.rounding), self.rounding.kind.block_rows
        group = self.shape[1] if self.rounding.group == ROW else self.rounding.group
        of_codes, of_groups = _blocks(columns, unit), _blocks(columns, group)
        of_rows = _blocks(rows, block_rows)
        codes = numbers_of(read_stored(self.stored[0], (cut[0], of_codes)), self.rounding)
        first = columns.start - of_codes.start * unit
        codes = codes[:, first : first + len(columns)]
        steps = self._steps(read_stored, (of_rows, of_groups))
        by_row = torch.tensor([row // block_rows - of_rows.start for row in rows]).long()
        by_column = torch.tensor([column // group - of_groups.start for column in columns]).long()
        return codes * steps[by_row][:, by_column]

    def _steps(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        scales = read_stored(self.stored[1], cut)
        if self.rounding.format == "mxfp4":
            return torch.exp2(scales.float() - 127)
        if self.rounding.kind.has_tensor_scale:
            return scales.float() / read_stored(self.stored[2], (slice(None),))
        return scales.float()


def _blocks(part: range, size: int) -> slice:
    return slice(part.start // size, -(-part.stop // size))


def find_compressed(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, CompressedMatrix]:
    """Return name -> matrix of a folder whose `quantization_config` is `config`.

    `shapes` are those of the tensors on disk. Raises `CheckpointError` for formats that mkd does not write,
    and for codes without scales of the right shape.
    """
    rounding, found = _rounding(directory, config), {}
    if rounding.inputs:
        _warn_of_inputs(directory)
    for scale in (name for name in shapes if name.endswith(WEIGHT + SCALE)):
        name = scale.removesuffix(SCALE)
        codes = name + PACKED if name + PACKED in shapes else name
        unit = elements_of_code(rounding)
        sizes = shapes.get(codes, ())
        if len(sizes) == 2:
            full = sizes[0], sizes[1] * unit
            groups = 1 if rounding.group == ROW else full[1] // rounding.group
            if shapes[scale] == (full[0] // rounding.kind.block_rows, groups):
                more = (name + GLOBAL, name + SHAPE, name.removesuffix("weight") + INPUT_GLOBAL)
                stored = (codes, scale, *(one for one in more if one in shapes))
                found[name] = CompressedMatrix(stored, full, rounding)
                continue
        what = f"{directory}: {name} has codes of shape {list(sizes)} and scales of {list(shapes[scale])}"
        why = f"they do not fit the format {rounding.describe()}"
        raise CheckpointError(what, why, "download the model again", code="hf-files-damaged")
    return found


@cache  # once for a model
def _warn_of_inputs(directory: Path) -> None:
    LOG.warning("%s rounds inputs of its matrices in a server; here they stay exact", directory)


def _rounding(directory: Path, config: Mapping[str, Any]) -> Rounding:
    """Return the format that `quantization_config` describes."""
    layout, groups = config.get("format"), config.get("config_groups") or {}
    of_linears: Mapping[str, Any] = next(iter(groups.values()), {}) if len(groups) == 1 else {}
    weights, inputs = of_linears.get("weights"), bool(of_linears.get("input_activations"))
    if isinstance(weights, Mapping) and weights.get("symmetric", True) and not weights.get("actorder"):
        for name in FORMATS:
            group = weights.get("group_size") or ROW
            if weights.get("strategy") == "block" and weights.get("block_structure") == [128, 128]:
                group = 128
            found = Rounding(name, group, inputs=inputs)
            is_known = group in found.kind.groups and weights.get("num_bits") == found.kind.bits
            if is_known and layout_of(found) == layout:
                return found
    what = f"{directory / 'config.json'}: compressed-tensors with the format {layout!r} and weights {weights}"
    known = ", ".join(sorted({one for names in LAYOUTS.values() for one in names}))
    why = f"mkd reads {known}, symmetric, in the groups that it writes"
    do = "use the original checkpoint of this model"
    raise CheckpointError(what, why, do, code="hf-quantisation-not-supported")
