"""Which matrices of a student are rounded, with the lengths of their rows on a process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from mkd.families.layer_shape import LayerShape
from mkd.families.registry import FAMILIES
from mkd.families.weight_rules import Entry, Rule
from mkd.plan.models.model_shape import ModelShape

# Of the parameters of a decoder layer. Grouped layers number the weights of their experts.
_MATRIX = re.compile(
    r"(?:^|\.)linear_(?:qkv|proj|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj|fc1|fc2)\.weight\d*$"
)


def is_matrix(parameter: str) -> bool:
    """Return True for the weight of a linear layer of attention or of an MLP, by Megatron's name."""
    return bool(_MATRIX.search(parameter))


@dataclass(frozen=True)
class LayerMatrix:
    """The weight of a linear layer that may be rounded; of one expert if the layer has experts."""

    name: str  # Megatron's, relative to the layer
    layer: int
    tensors: tuple[str, ...]  # Hugging Face names of its parts, each once
    is_stacked: bool  # the tensors hold all experts of the layer
    row: int  # elements of a row
    row_of_process: int  # elements of a row on one process
    parts: tuple[int, ...]  # rows of each part of a block on one process


def layer_matrices(shape: ModelShape, tensor_parallel: int = 1) -> Iterator[LayerMatrix]:
    """Yield the matrices of all layers that a rounded student may round."""
    table = FAMILIES[shape.family].tensors
    names = [name for name in table if is_matrix(name)]
    for index, layer in enumerate(shape.layers):
        for name in names:
            entry = table[name]
            if entry.needs and not attrgetter(entry.needs)(layer):
                continue
            experts = layer.moe.num_experts if "{expert}" in name and layer.moe and not entry.stack else 1
            for expert in range(experts):
                yield _matrix(shape.for_layer(layer), layer, index, name, entry, expert, tensor_parallel)


def _matrix(
    shape: Any, layer: LayerShape, index: int, name: str, entry: Entry, expert: int, ranks: int
) -> LayerMatrix:
    rule = entry.rule
    ranks = 1 if rule.replicated else ranks
    parts = tuple(filter(None, rule.parts(shape, layer, ranks)))
    lengths = rule.parts(shape, layer, 1)
    named = [one for one, length in zip(entry.tensors, lengths, strict=False) if length] or entry.tensors
    tensors = (one.replace("{layer}", str(index)).replace("{expert}", str(expert)) for one in named)
    (other,) = rule.other_dims(shape, layer)
    row = row_of_process = other
    if rule.dim == 1:
        row = _length(rule, shape, layer, 1)
        row_of_process = -(-rule.blocks(shape, layer, ranks) // ranks) * sum(parts)
        parts = (other,)
    return LayerMatrix(
        name, index, tuple(dict.fromkeys(tensors)), entry.stack is not None, row, row_of_process, parts
    )


def _length(rule: Rule, shape: Any, layer: LayerShape, ranks: int) -> int:
    return rule.blocks(shape, layer, ranks) * sum(rule.parts(shape, layer, ranks))
