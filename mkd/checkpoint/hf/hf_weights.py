"""Fill a model part from a Hugging Face folder: each rank reads only the slices that it needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_carried import tell_of_skipped
from mkd.checkpoint.hf.hf_check import check_hf_checkpoint, layer_of
from mkd.checkpoint.hf.hf_codes import read_codes
from mkd.checkpoint.hf.hf_names import Piece, TensorMap, expert_of, find_map, hf_tensor_shapes
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_tower import TOWER, tower_of
from mkd.checkpoint.one_value import unfilled_note
from mkd.errors import CheckpointError, ErrorList, raise_all
from mkd.families.weight_rules import EMBEDDING, LM_HEAD
from mkd.parallel.context import ParallelContext
from mkd.plan.models.lora_shape import is_factor
from mkd.plan.models.model_shape import ModelShape

LOG = logging.getLogger("mkd")
UNTRAINED = (
    ".expert_bias",
    ".output_scale",
    ".activation_func.beta",
    ".activation_func.eps",
)  # ends of the names of buffers that files hold


@torch.no_grad()
def load_hf_weights(
    model_part: nn.Module,  # its parameters are overwritten in place; dtype and device stay
    shape: ModelShape,
    checkpoint: HFCheckpoint,
    context: ParallelContext,
    first_layer: int = 0,  # index in the whole model of the part's layer 0
    # Makes the context in which the part's layer of that index has memory; None: the part has all its memory.
    layer_memory: Callable[[int], AbstractContextManager[None]] | None = None,
    # Returns codes and scales to be filled in place of a parameter; None: the parameter itself is.
    stored_codes: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None,
) -> None:
    """Fill a model part from `checkpoint`, one slice at a time.

    Padded vocabulary rows and attention groups become zero. The headers are checked before any weight is
    read. Raises `CheckpointError` for a parameter without a source, for a tensor of its layers without a
    parameter, for a tied model whose stored head differs from its embedding, and for values that are NaN or
    infinite.
    """
    check_hf_checkpoint(shape, checkpoint)
    if first_layer == 0:
        tell_of_skipped(shape, checkpoint)
    parameters = stored_tensors(model_part)
    maps = map_part(parameters, shape, first_layer, context)
    for name, tensor_map in maps.items() if layer_memory is None else _by_layer(maps, layer_memory):
        parameter = parameters[name].data
        pieces = tensor_map.pieces(tuple(parameter.shape), context.tp_rank, context.tp_size)
        if stored_codes and (codes := stored_codes(parameters[name])):
            read_codes(checkpoint, pieces, *codes)
            continue
        if sum(piece.in_shard(parameter).numel() for piece in pieces) < parameter.numel():
            parameter.zero_()
        for piece in pieces:
            source = _read_piece(checkpoint, piece.tensor, piece)
            piece.in_shard(parameter).copy_(piece.of_part(source))
            is_tied = piece.tensor == EMBEDDING and shape.tie_word_embeddings
            if is_tied and LM_HEAD in checkpoint.headers:
                _check_tied(checkpoint, source, _read_piece(checkpoint, LM_HEAD, piece))
    load_tower(model_part, checkpoint)


def tell_of_unfilled(checkpoint: HFCheckpoint) -> None:
    """Log the matrices of one value that any rank has read. Collective."""
    found: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, checkpoint.unfilled)
    note = unfilled_note(str(checkpoint.directory), {name: one[name] for one in found for name in one})
    if note:
        LOG.warning(note)


def stored_tensors(model_part: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model part that tables describe: parameters, and those of `UNTRAINED`.

    The tower has no table, see `tower_of`; for adapters see hf_adapters.py.
    """
    named = ((name, one) for name, one in model_part.named_parameters() if not is_factor(name))
    parameters = {name: one for name, one in named if not name.startswith(TOWER)}
    untrained = {name: one for name, one in model_part.named_buffers() if name.endswith(UNTRAINED)}
    return parameters | untrained


def _by_layer(
    maps: dict[str, TensorMap], layer_memory: Callable[[int], AbstractContextManager[None]]
) -> Iterator[tuple[str, TensorMap]]:
    """Yield the items of `maps`, those of each layer inside its context."""

    def layer_of_part(item: tuple[str, TensorMap]) -> int:
        match = re.match(r"decoder\.layers\.(\d+)\.", item[0])
        return -1 if match is None else int(match.group(1))

    # Buffers come after all parameters, and each layer has memory only once.
    for layer, items in groupby(sorted(maps.items(), key=layer_of_part), layer_of_part):
        with nullcontext() if layer < 0 else layer_memory(layer):
            yield from items


def _read_piece(checkpoint: HFCheckpoint, tensor: str, piece: Piece) -> Tensor:
    return checkpoint.read(tensor, piece.tensor_cut)


def _check_tied(checkpoint: HFCheckpoint, embedding: Tensor, head: Tensor) -> None:
    if not torch.equal(embedding, head):
        raise CheckpointError(
            f"{checkpoint.directory}: {LM_HEAD} differs from {EMBEDDING}",
            "config.json ties them (tie_word_embeddings), so one of the two would be lost",
            "set tie_word_embeddings to false in config.json, or remove the tensor that does not belong",
            code="hf-tensor-unexpected",
        )


def map_part(
    parameters: dict[str, Tensor], shape: ModelShape, first_layer: int, context: ParallelContext
) -> dict[str, TensorMap]:
    """Return the map of every parameter of a model part. Raises CheckpointErrors for those without one."""
    experts = context.experts(shape.num_experts)
    maps = {name: find_map(shape, name, first_layer, experts.start) for name in parameters}
    problems, why = [], "model and config.json differ (biases, norms, sizes or number of layers)"
    for name, tensor_map in maps.items():
        own = tuple(parameters[name].shape)
        if tensor_map is None or not tensor_map.fits(own, context.tp_size):
            what = f"parameter {name} {list(own)} has no source in a {shape.family} checkpoint"
            do = "build the model from the checkpoint's own config.json"
            problems.append(CheckpointError(what, why, do, code="hf-tensor-unexpected"))
    raise_all(problems)
    covered = {tensor for tensor_map in maps.values() for tensor in tensor_map.tensors}
    layers = {layer_of(tensor) for tensor in covered} - {None}
    for tensor in hf_tensor_shapes(shape):
        is_elsewhere = expert_of(tensor) not in (None, *experts)
        if layer_of(tensor) in layers and tensor not in covered and not is_elsewhere:
            what, why = f"the model has no parameter for tensor {tensor}", "it would be left out silently"
            problems.append(CheckpointError(what, why, code="hf-tensor-unexpected"))
    raise_all(problems)
    return maps


@torch.no_grad()
def load_tower(model_part: nn.Module, checkpoint: HFCheckpoint) -> None:
    """Fill the part's tower, whole on every rank.

    Raises `ErrorList` for tensors that are missing, not expected or of another shape.
    """
    tower = tower_of(model_part)
    if not tower:
        return
    where, problems = checkpoint.directory, []
    why = "config.json and transformers' module of this family call for it"
    for name in sorted(tower.keys() ^ checkpoint.tower.keys()):
        is_missing = name in tower
        text = "is missing" if is_missing else "is not expected"
        code = "hf-files-damaged" if is_missing else "hf-tensor-unexpected"
        what = f"{where}: tensor {checkpoint.names.on_disk(name)} {text}"
        problems.append(CheckpointError(what, why, "check config.json against the weights", code=code))
    for name in sorted(tower.keys() & checkpoint.tower.keys()):
        found, full = checkpoint.tower[name].shape, tuple(tower[name].shape)
        if found != full:
            what = f"{where}: tensor {checkpoint.names.on_disk(name)} has shape {list(found)}"
            do = "check config.json against the weights"
            problems.append(CheckpointError(what, f"expected {list(full)}", do, code="hf-tensor-unexpected"))
    if problems:
        raise ErrorList(problems)
    for name, parameter in tower.items():
        parameter.copy_(checkpoint.read(name, (slice(None),) * parameter.dim()))
