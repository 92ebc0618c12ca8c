"""Read the families' weight tables: bind a parameter to its Hugging Face tensors.

No other file reads the tables; `mkd/families/weight_rules.py` describes them. `pieces` lists the copies
between a parameter and its tensors. Reading follows them forwards and writing backwards, so that the two
cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from operator import attrgetter

from torch import Tensor

from mkd.families.layer_shape import LayerShape
from mkd.families.registry import FAMILIES
from mkd.families.weight_rules import EMBEDDING, FUSED_NORMS, LM_HEAD, Entry, Rule, Stack
from mkd.plan.models.model_shape import ModelShape

_LAYER_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NUMBER = re.compile(r"(?<=experts\.)\d+(?=\.)")
# Transformer Engine's grouped layers number their weights: experts.linear_fc1.weight3
_GROUPED = re.compile(r"(?<=\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)")

EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")  # number of layers after the decoder's

Cut = tuple[slice, ...]  # a slice for each dimension, without steps


@dataclass(frozen=True)
class Piece:
    """Elements that a parameter's shard and a Hugging Face tensor share."""

    tensor: str
    tensor_cut: Cut  # part of the tensor that has them, and no others
    shard_cut: Cut  # the same of the shard
    stack: Stack | None = None  # form of the tensor if it holds all experts

    def in_tensor(self, tensor: Tensor) -> Tensor:
        """Return the view of these elements in the whole Hugging Face tensor."""
        return self.of_part(tensor[self.tensor_cut])

    def of_part(self, part: Tensor) -> Tensor:
        """Return the view of these elements in the part `tensor_cut` of the tensor.

        It has the shape of `in_shard`. A stack's part is one expert, [1, ...]; interleaved channels get a
        leading dimension of parts.
        """
        if self.stack is None:
            return part
        expert = part[0].mT if self.stack.is_transposed else part[0]
        return expert.unflatten(0, (-1, self.stack.interleaved)).transpose(0, 1)

    def in_shard(self, shard: Tensor) -> Tensor:
        """Return the view of these elements in the parameter."""
        part = shard[self.shard_cut]
        return part if self.stack is None else part.unflatten(0, (self.stack.interleaved, -1))


@dataclass(frozen=True)
class TensorMap:
    """One Megatron parameter of one model, bound to its Hugging Face tensors."""

    shape: ModelShape
    layer: LayerShape | None  # None outside the decoder layers
    entry: Entry
    tensors: tuple[str, ...]  # without {layer} and {expert}
    expert: int | None = None  # index in the model of the parameter's expert

    @property
    def is_replicated(self) -> bool:
        """True if every tensor-parallel rank holds the whole parameter."""
        return self.entry.rule.replicated

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> full shape."""
        blocks, lengths = self._blocks(1), dict.fromkeys(self.tensors, 0)
        for tensor, part in zip(self.tensors, self._parts(1), strict=True):
            lengths[tensor] += blocks * part
        shapes = {name: self._with_other_dims(length) for name, length in lengths.items()}
        stack = self.entry.stack
        if stack is None:
            return shapes
        num_experts = _num_experts(self.entry, self.shape, self.layer)
        order = -1 if stack.is_transposed else 1
        return {name: (num_experts, *of_expert[::order]) for name, of_expert in shapes.items()}

    def fits(self, shard_shape: tuple[int, ...], tp_size: int) -> bool:
        """Return True if shards of `shard_shape` on `tp_size` ranks hold all blocks, and only whole ones."""
        dim = self.entry.rule.dim
        if len(shard_shape) <= dim or shard_shape != self._with_other_dims(shard_shape[dim]):
            return False
        ranks = 1 if self.is_replicated else tp_size
        blocks, remainder = divmod(shard_shape[dim], sum(self._parts(ranks)))
        needed = -(-self._blocks(ranks) // ranks)
        return remainder == 0 and (blocks >= needed if self.entry.rule.any_padding else blocks == needed)

    def pieces(self, shard_shape: tuple[int, ...], tp_rank: int, tp_size: int) -> list[Piece]:
        """List what rank `tp_rank` copies. `shard_shape` is its parameter's shape, padding included."""
        if self.entry.stack is None:
            return list(self._runs(shard_shape, tp_rank, tp_size))
        assert self.is_replicated and self.expert is not None, "experts are whole on their process"
        everything = (slice(None),) * len(shard_shape)
        expert = slice(self.expert, self.expert + 1)
        return [Piece(self.tensors[0], (expert, *everything), everything, self.entry.stack)]

    def _runs(self, shard_shape: tuple[int, ...], tp_rank: int, tp_size: int) -> Iterator[Piece]:
        rank, ranks = (0, 1) if self.is_replicated else (tp_rank, tp_size)
        dim, parts, real = self.entry.rule.dim, self._parts(ranks), self._blocks(ranks)
        owned = shard_shape[dim] // sum(parts)
        first = rank * owned
        count = max(0, min(owned, real - first))
        others = (slice(None),) * len(shard_shape)

        def run(tensor: str, tensor_start: int, shard_start: int, length: int) -> Piece:
            in_tensor, in_shard = (
                (*others[:dim], slice(start, start + length), *others[dim + 1 :])
                for start in (tensor_start, shard_start)
            )
            return Piece(tensor, in_tensor, in_shard)

        if len(parts) == 1:  # neighbouring blocks touch on both sides, so one copy suffices
            if count:
                yield run(self.tensors[0], first * parts[0], 0, count * parts[0])
            return
        starts = _part_starts(self.tensors, parts, real)
        for block in range(count):
            shard_start = block * sum(parts)
            for tensor, tensor_start, part in zip(self.tensors, starts, parts, strict=True):
                yield run(tensor, tensor_start + (first + block) * part, shard_start, part)
                shard_start += part

    def _blocks(self, ranks: int) -> int:
        return self.entry.rule.blocks(self.shape, self.layer, ranks)

    def _parts(self, ranks: int) -> tuple[int, ...]:
        return tuple(filter(None, self.entry.rule.parts(self.shape, self.layer, ranks)))

    def _with_other_dims(self, length: int) -> tuple[int, ...]:
        """Return the full shape if the cut dimension is `length` long."""
        others = self.entry.rule.other_dims(self.shape, self.layer)
        return (*others[: self.entry.rule.dim], length, *others[self.entry.rule.dim :])


def _part_starts(tensors: tuple[str, ...], parts: tuple[int, ...], blocks: int) -> list[int]:
    """Return where each part begins in its tensor. Only a fused tensor has starts other than 0."""
    filled: dict[str, int] = {}
    starts = []
    for tensor, part in zip(tensors, parts, strict=True):
        starts.append(filled.get(tensor, 0))
        filled[tensor] = starts[-1] + blocks * part
    return starts


def find_map(shape: ModelShape, parameter: str, first_layer: int, first_expert: int = 0) -> TensorMap | None:
    """Return the map of a parameter of a model part; None if it is unknown.

    Layer 0 of the part is the model's layer `first_layer`. `first_expert` is the index in the model of the
    part's first expert, for parameters that number their local experts.
    """
    match = _LAYER_PARAMETER.fullmatch(parameter)
    if match is None:
        entry = FAMILIES[shape.family].model_tensors.get(parameter)
        return None if entry is None else bind(shape, entry)
    layer, name = first_layer + int(match.group(1)), _GROUPED.sub(r"local_experts.\3.\1.\2", match.group(2))
    if layer >= shape.num_layers:
        return None
    expert = _EXPERT_NUMBER.search(name)
    if expert:
        name = _EXPERT_NUMBER.sub("{expert}", name)
    entry = FAMILIES[shape.family].tensors.get(FUSED_NORMS.get(name, name))
    if entry is None or not exists(entry, shape.layers[layer]):
        return None
    return bind(shape, entry, layer, first_expert + int(expert[0]) if expert else None)


def factor_map(shape: ModelShape, factor: str, factor_shape: tuple[int, ...], first_layer: int) -> TensorMap:
    """Return the map of an adapter's factor A [rank, in] or B [out, rank] to the tensors of its weight.

    `factor` ends with .lora_a or .lora_b; `factor_shape` is of this rank's shard. The factor that has the cut
    dimension of the weight is cut like it. The other one is whole on every rank, and the same for all tensors
    of the weight: its map names the first one.
    """
    name, _, kind = factor.rpartition(".lora_")
    weight = find_map(shape, f"{name}.weight", first_layer)
    assert weight is not None, f"{name} is in the table of weights"
    rule, dim = weight.entry.rule, 1 if kind == "a" else 0
    rank, length = factor_shape[1 - dim], factor_shape[dim]
    if rule.dim == dim:
        rule = replace(rule, other_dims=lambda model, layer: (rank,))
        return replace(weight, entry=replace(weight.entry, rule=rule))
    whole = Rule(
        lambda model, layer, ranks: 1,
        lambda model, layer, ranks: (length,),
        dim=dim,
        other_dims=lambda model, layer: (rank,),
        replicated=True,
    )
    return replace(weight, entry=replace(weight.entry, rule=whole), tensors=weight.tensors[:1])


def carried_patterns(shape: ModelShape) -> tuple[str, ...]:
    """Return names, with * for any text, of tensors that mkd neither runs nor trains, and exports copy.

    Layers behind the decoder's own predict further tokens.
    """
    given = (shape.hf_config.get(name) for name in EXTRA_LAYERS)
    count = next((number for number in given if type(number) is int and number > 0), 0)
    layers = (f"model.layers.{shape.num_layers + extra}.*" for extra in range(count))
    return (*FAMILIES[shape.family].carried, *layers)


def carried_names(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Return those of `names` that `carried_patterns` describe."""
    patterns = carried_patterns(shape)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def expert_of(tensor: str) -> int | None:
    """Return the number of the expert that a Hugging Face tensor belongs to; None if to no single one."""
    match = _EXPERT_NUMBER.search(tensor)
    return None if match is None else int(match[0])


def hf_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a checkpoint, in model order, without a tied head."""
    embedding, norm, head = FAMILIES[shape.family].model_tensors.values()
    maps = [bind(shape, embedding)]
    for index, layer in enumerate(shape.layers):
        for name, entry in FAMILIES[shape.family].tensors.items():
            if exists(entry, layer):
                is_apart = "{expert}" in name and entry.stack is None
                experts = range(_num_experts(entry, shape, layer)) if is_apart else (None,)
                maps += [bind(shape, entry, index, expert) for expert in experts]
    maps += [bind(shape, norm), bind(shape, head)]
    return {tensor: full for tensor_map in maps for tensor, full in tensor_map.tensor_shapes().items()}


def bind(
    shape: ModelShape, entry: Entry, layer_index: int | None = None, expert: int | None = None
) -> TensorMap:
    """Bind a row of a table to a layer, and to an expert if the parameter belongs to one."""
    layer, tensors = None, entry.tensors
    if layer_index is not None:
        layer = shape.layers[layer_index]
        shape = shape.for_layer(layer)
        tensors = tuple(tensor.replace("{layer}", str(layer_index)) for tensor in tensors)
    if len(tensors) > 1:
        lengths = entry.rule.parts(shape, layer, 1)
        tensors = tuple(tensor for tensor, length in zip(tensors, lengths, strict=True) if length)
    if expert is not None:
        tensors = tuple(tensor.replace("{expert}", str(expert)) for tensor in tensors)
    if shape.tie_word_embeddings and tensors == (LM_HEAD,):
        tensors = (EMBEDDING,)
    return TensorMap(shape, layer, entry, tensors, expert)


def _num_experts(entry: Entry, shape: ModelShape, layer: LayerShape | None) -> int:
    assert entry.rule.experts is not None, f"the rule of {entry.tensors} has no number of experts"
    return entry.rule.experts(shape, layer)


def exists(entry: Entry, layer: LayerShape) -> bool:
    """Return True if `layer` has the parameter."""
    return not entry.needs or bool(attrgetter(entry.needs)(layer))
