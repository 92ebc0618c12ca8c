"""Tensors of a Hugging Face folder that hold all experts of a layer, in a form that a table does not have.

A family whose files may have such stacks in place of tensors of single experts says so
(`Family.reads_stacked_experts`). A family whose files always have stacks describes them in its table
(`Stack`). Each matrix may be turned in some of its files (`Family.reads_turned_stacks`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mkd.checkpoint.hf.hf_compressed import ReadStored
from mkd.checkpoint.hf.hf_names import Cut
from mkd.checkpoint.hf.hf_quantised import TensorHeader
from mkd.checkpoint.hf.hf_tower import model_type_of
from mkd.families.registry import FAMILIES
from mkd.families.vision import VISION_FAMILIES

STACK = re.compile(r"(model\..*layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # equal runs of rows


@dataclass(frozen=True)
class ExpertMatrix:
    """The matrix of one expert in a stack [experts, rows, columns]."""

    stored: tuple[str]  # name on disk of the stack
    header: TensorHeader  # of the matrix, [rows, columns]
    expert: int
    first_row: int  # in the expert's part of the stack

    def read(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        """Return the part `cut`, [rows, columns] in the stack's dtype."""
        first, last, _ = cut[0].indices(self.header.shape[0])
        rows = slice(self.first_row + first, self.first_row + last)
        return read_stored(self.stored[0], (slice(self.expert, self.expert + 1), rows, cut[1]))[0]


@dataclass(frozen=True)
class TurnedStack:
    """A stack [experts, out, in] in place of [experts, in, out]."""

    stored: tuple[str]  # name on disk
    header: TensorHeader  # of the turned stack, [experts, in, out]

    def read(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        """Return the part `cut`, [experts, in, out] in the dtype on disk."""
        return read_stored(self.stored[0], (cut[0], cut[2], cut[1])).mT


def read_stacks(
    directory: Path,
    headers: Mapping[str, TensorHeader],  # names on disk
    quantised: Container[str],  # names of tensors that are not read as they are on disk
) -> tuple[dict[str, TensorHeader], dict[str, ExpertMatrix | TurnedStack]]:
    """Return the headers in the form of the family's table, and by name what is not so on disk."""
    model_type = model_type_of(directory)
    outer = VISION_FAMILIES.get(model_type)
    family = FAMILIES.get((outer and outer.text_family) or model_type)
    if family is not None and family.reads_turned_stacks:
        turned = dict(_turned(headers, quantised))
        return dict(headers) | {name: one.header for name, one in turned.items()}, dict(turned)
    if family is None or not family.reads_stacked_experts:
        return dict(headers), {}
    found: dict[str, TensorHeader] = {}
    matrices: dict[str, ExpertMatrix | TurnedStack] = {}
    for name, header in headers.items():
        match = STACK.fullmatch(name)
        if match is None or len(header.shape) != 3 or name in quantised:
            found[name] = header
            continue
        own = dict(_matrices(match, header))
        found |= {expert: matrix.header for expert, matrix in own.items()}
        matrices |= own
    return found, matrices


def _turned(
    headers: Mapping[str, TensorHeader], quantised: Container[str]
) -> Iterator[tuple[str, TurnedStack]]:
    """Yield the stacks [experts, out, in]: those of a layer share the hidden size where only they can."""
    for name, gate_up in headers.items():
        match = STACK.fullmatch(name)
        if match is None or match[2] != "gate_up_proj":
            continue
        down_name = f"{match[1]}down_proj"
        down = headers.get(down_name)
        if down is None or name in quantised or down_name in quantised:
            continue
        if len(gate_up.shape) == len(down.shape) == 3 and gate_up.shape[2] == down.shape[1]:
            for one, header in ((name, gate_up), (down_name, down)):
                experts, rows, columns = header.shape
                yield one, TurnedStack((one,), replace(header, shape=(experts, columns, rows)))


def _matrices(match: re.Match[str], header: TensorHeader) -> Iterator[tuple[str, ExpertMatrix]]:
    experts, rows, columns = header.shape
    parts = PARTS[match[2]]
    own = replace(header, shape=(rows // len(parts), columns))
    for expert in range(experts):
        for index, part in enumerate(parts):
            name = f"{match[1]}{expert}.{part}.weight"
            yield name, ExpertMatrix((match[0],), own, expert, index * own.shape[0])
