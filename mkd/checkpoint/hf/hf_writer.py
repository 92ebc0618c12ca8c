"""Hugging Face checkpoints out: the model parts of all ranks become one folder.

The bytes are the same for every layout. Tensors travel one at a time to global rank 0, which streams them to
disk: within the tensor-parallel group by broadcast, between pipeline stages by one send, and each expert by
one send from the rank that has it. Padding (vocabulary rows, attention groups) is dropped before anything is
sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_adapters import with_adapter
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_carried import NUM_FURTHER, find_carried, predicts_further
from mkd.checkpoint.hf.hf_folder import give_up, publish, start_writing
from mkd.checkpoint.hf.hf_names import Piece, TensorMap, find_map
from mkd.checkpoint.hf.hf_reader import INDEX_FILE, contained_file
from mkd.checkpoint.hf.hf_rounded import RoundedFiles
from mkd.checkpoint.hf.hf_shards import (
    NO_CARRIED,
    CarriedTensor,
    ExportPlan,
    export_plan,
    stored_dtype,
    write_shards,
)
from mkd.checkpoint.hf.hf_tower import TOWER, tower_of
from mkd.checkpoint.hf.hf_weights import map_part, stored_tensors
from mkd.errors import CheckpointError, MkdError
from mkd.families.config_values import PART_OBJECTS
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape

OTHER_FOLDER = "choose another folder"


@dataclass(frozen=True)
class Owner:
    """The place of a tensor, or of one expert in it: a pipeline rank, a parameter and its shard's shape."""

    pp_rank: int
    parameter: str
    part: int
    first_layer: int
    shard_shape: tuple[int, ...]
    ep_rank: int | None = None  # expert-parallel rank that holds it; None: not the weight of an expert
    first_expert: int = 0  # the first of the model's experts on that rank


def export_hf(
    model_parts: list[tuple[nn.Module, int]],  # this rank's parts, each with the model's index of its layer 0
    shape: ModelShape,
    out_dir: str | Path,
    *,
    context: ParallelContext,
    assets: HFAssets,  # configuration of the same model, and the tokenizer that belongs to it
    dtype: torch.dtype | None = None,  # dtype of the files; default: the parameters' dtype
    max_shard_bytes: int = 5_000_000_000,
    in_the_way: Callable[[], Exception | None] | None = None,  # why the folder must not be replaced
    record: Callable[[Path], None] | None = None,  # gets the complete folder that is about to be published
    rounded: RoundedFiles | None = None,  # how matrices are stored, in exact weights; None: as they are
) -> None:
    """Write the model as a Hugging Face folder.

    Collective: all ranks call it; only the first replica, and the first copies of experts, send weights. A
    model that is already in `out_dir` is replaced: it stays whole until the new files are complete. Raises
    `CheckpointError` on every rank if the folder cannot be written or `assets` describe another model.
    """
    out_dir = Path(out_dir)
    problem, carried = None, NO_CARRIED
    if context.rank == 0:  # it alone reads and writes files
        problem = (in_the_way() if in_the_way else None) or prepare_folder(shape, out_dir, assets)
        problem, carried = (problem, carried) if problem else _find_carried(shape, assets)
    raise_everywhere(context, problem)
    # Global rank 0 holds the first stage, which has the tower.
    shapes = {name: tuple(one.shape) for part, _ in model_parts for name, one in tower_of(part).items()}
    tower = context.broadcast_object(shapes)
    headers = {} if rounded is None else {"headers": rounded.headers}
    plan = export_plan(
        shape, dtype or _dtype_of(model_parts[0][0]), max_shard_bytes, tower, carried, **headers
    )
    sources = Sources(model_parts, shape, context)
    sources.check(plan)
    problem = None
    if context.is_first_replica or context.edp.rank == 0:
        stream = (
            (name, sources.collect(name, full, stored_dtype(name, plan.dtype)))
            for name, full in plan.sources.items()
        )
        is_writer = context.rank == 0
        problem = (
            write_folder(plan, _in_files(stream, carried, rounded), out_dir, assets, record, rounded)
            if is_writer
            else drain(stream)
        )
    raise_everywhere(context, problem)


def _find_carried(shape: ModelShape, assets: HFAssets) -> tuple[MkdError | None, Mapping[str, CarriedTensor]]:
    """Return a problem, or None, and the tensors that the export copies."""
    try:
        return None, find_carried(shape, assets.model)
    except MkdError as error:  # carried to all ranks and raised there
        return error, NO_CARRIED


def _in_files(
    trained: Iterator[tuple[str, Tensor]], carried: Mapping[str, CarriedTensor], rounded: RoundedFiles | None
) -> Iterator[Tensor]:
    """Yield the trained tensors as files hold them, then the carried ones.

    Of the former, keep those that the latter copy.
    """
    copied = {one.copy_of: torch.empty(0) for one in carried.values() if one.copy_of}
    for name, tensor in trained:
        if name in copied:
            copied[name] = tensor
        yield from [tensor] if rounded is None else rounded.encode(name, tensor)
    for one in carried.values():
        yield copied[one.copy_of].to(one.dtype) if one.copy_of else one.read()


def _dtype_of(model_part: nn.Module) -> torch.dtype:
    return next(model_part.parameters()).dtype


class Sources:
    """Finds Hugging Face tensors in the model parts of all pipeline stages and fetches them."""

    def __init__(self, model_parts: list[tuple[nn.Module, int]], shape: ModelShape, context: ParallelContext):
        self.shape, self.context = shape, context
        self.parts = [part for part, _ in model_parts]
        self.parameters = [self.stored(part) for part in self.parts]
        self.tower = {name: one for part, _ in model_parts for name, one in tower_of(part).items()}
        try:
            mine = self.owned([first_layer for _, first_layer in model_parts])
        except MkdError as error:  # told to the other stages, which must not wait
            mine = error
        stages: list[dict[str, list[Owner]] | MkdError] = [mine] * context.pp_size
        dist.all_gather_object(stages, mine, group=context.pp_group)
        self.owners: dict[str, list[Owner]] = {}  # several for a tensor that holds all experts
        for stage in stages:
            if isinstance(stage, MkdError):
                raise stage
            self.owners = stage | self.owners  # if a tied embedding is on two stages, the first counts

    def stored(self, model_part: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a model part that make the tensors."""
        return stored_tensors(model_part)

    def map_of(self, tensor: str, owner: Owner) -> TensorMap:
        """Return the map of the parameter that makes `tensor`."""
        found = find_map(self.shape, owner.parameter, owner.first_layer)
        assert found is not None, "an owner has a map"
        return found

    def shard(self, owner: Owner) -> Tensor:
        """Return this rank's shard of a parameter, with its adapter added."""
        shard = self.parameters[owner.part][owner.parameter].detach()
        return with_adapter(self.parts[owner.part], owner.parameter, shard)

    def owned(self, first_layers: list[int]) -> dict[str, list[Owner]]:
        """Return tensor -> its owners on this pipeline rank."""
        owned: dict[str, list[Owner]] = {}
        for part, (parameters, first_layer) in enumerate(zip(self.parameters, first_layers, strict=True)):
            experts = self.context.experts(self.shape.num_experts)
            maps = map_part(parameters, self.shape, first_layer, self.context)
            for name, tensor_map in maps.items():
                owner = Owner(self.context.pp_rank, name, part, first_layer, tuple(parameters[name].shape))
                if tensor_map.expert is not None:
                    self._add_experts(owned, owner, len(experts))
                    continue
                for tensor in tensor_map.tensors:
                    owned.setdefault(tensor, [owner])
        return owned

    def _add_experts(self, owned: dict[str, list[Owner]], here: Owner, experts_of_rank: int) -> None:
        """Add the owners of an expert's tensors on every expert-parallel rank, which are all alike."""
        for ep_rank in range(self.context.ep.size):
            owner = replace(here, ep_rank=ep_rank, first_expert=ep_rank * experts_of_rank)
            tensor_map = find_map(self.shape, here.parameter, here.first_layer, owner.first_expert)
            assert tensor_map is not None, "the rank's own expert has a map"
            for tensor in dict.fromkeys(tensor_map.tensors):
                owned.setdefault(tensor, []).append(owner)

    def check(self, plan: ExportPlan) -> None:
        missing = [name for name in plan.sources if not (name.startswith(TOWER) or name in self.owners)]
        if missing:
            some = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
            what, why = f"no pipeline stage holds {some}", "the export would be incomplete"
            do = "export the model with the configuration that it was built from"
            raise CheckpointError(what, why, do, code="checkpoint-of-another-model")

    def collect(self, tensor: str, full: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return the tensor on global rank 0 (CPU), None elsewhere. Collective over the ranks that send."""
        if tensor.startswith(TOWER):  # rank 0 has it whole
            return self.tower[tensor].detach().to("cpu", dtype) if self.context.rank == 0 else None
        owner, context = self.owners[tensor][0], self.context
        if owner.ep_rank is not None:
            return self._collect_experts(tensor, full, dtype)
        if not context.is_first_replica:
            return None
        tensor_map = self.map_of(tensor, owner)
        dim = tensor_map.entry.rule.dim
        whole = torch.empty(full, dtype=dtype) if context.rank == 0 else None
        holders = 1 if tensor_map.is_replicated else context.tp_size
        on_stage = context.pp_rank == owner.pp_rank and context.tp_rank < holders
        for tp_rank in range(holders):
            pieces = tensor_map.pieces(owner.shard_shape, tp_rank, context.tp_size)
            pieces = [piece for piece in pieces if piece.tensor == tensor]
            if not pieces or not (on_stage or context.rank == 0):
                continue
            if on_stage and context.tp_rank == tp_rank:
                shard = self.shard(owner)
                part = torch.cat([piece.in_shard(shard) for piece in pieces], dim).to(dtype)
            else:
                cuts = (piece.tensor_cut[dim] for piece in pieces)
                length = sum(cut.stop - cut.start for cut in cuts)
                part_shape = [length if axis == dim else size for axis, size in enumerate(full)]
                part = torch.empty(part_shape, dtype=dtype, device=context.device)
            self._bring_to_rank_0(part, owner.pp_rank, tp_rank if holders > 1 else None)
            if whole is not None:
                _scatter(part.cpu(), pieces, whole, dim)
        return whole

    def _collect_experts(self, tensor: str, full: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return a tensor of experts on global rank 0. One message for each, from the rank that has it."""
        context = self.context
        whole = torch.empty(full, dtype=dtype, device="cpu" if context.rank == 0 else "meta")
        for owner in self.owners[tensor]:
            assert owner.ep_rank is not None, "the weight of an expert"
            source = context.first_expert_holder(owner.pp_rank, owner.ep_rank)
            if context.rank not in (0, source):
                continue
            tensor_map = find_map(self.shape, owner.parameter, owner.first_layer, owner.first_expert)
            assert tensor_map is not None, "an owner has a map"
            pieces = tensor_map.pieces(owner.shard_shape, 0, 1)
            (piece,) = (piece for piece in pieces if piece.tensor == tensor)
            place = whole[piece.tensor_cut]
            part = torch.empty(place.shape, dtype=dtype, device=context.device)
            if context.rank == source:
                shard = self.parameters[owner.part][owner.parameter].detach()
                piece.of_part(part).copy_(piece.in_shard(shard))
            if source != 0:
                message = part.flatten().view(torch.uint8)
                dist.recv(message, source) if context.rank == 0 else dist.send(message, 0)
            if context.rank == 0:
                place.copy_(part)
        return whole if context.rank == 0 else None

    def _bring_to_rank_0(self, part: Tensor, pp_rank: int, tp_rank: int | None) -> None:
        """Fill `part` on rank 0 in place, from tensor-parallel rank `tp_rank` of stage `pp_rank`.

        If `tp_rank` is None, all tensor-parallel ranks have it. Messages are bytes, which every backend
        carries for every dtype.
        """
        context, message = self.context, part.flatten().view(torch.uint8)
        if context.pp_rank == pp_rank and tp_rank is not None:
            dist.broadcast(message, dist.get_global_rank(context.tp_group, tp_rank), group=context.tp_group)
        if pp_rank == 0 or context.tp_rank != 0:
            return
        if context.pp_rank == pp_rank:
            dist.send(message, dist.get_global_rank(context.pp_group, 0), group=context.pp_group)
        else:
            dist.recv(message, dist.get_global_rank(context.pp_group, pp_rank), group=context.pp_group)


def _scatter(part: Tensor, pieces: list[Piece], whole: Tensor, dim: int) -> None:
    start = 0
    for piece in pieces:
        place = piece.in_tensor(whole)
        place.copy_(part.narrow(dim, start, place.size(dim)))
        start += place.size(dim)


def write_folder(
    plan: ExportPlan,
    stream: Iterator[Tensor],
    out_dir: Path,
    assets: HFAssets,
    record: Callable[[Path], None] | None = None,
    rounded: RoundedFiles | None = None,
) -> CheckpointError | None:
    """Write all files on rank 0.

    Return a failure only after the other ranks have sent everything, so that they do not wait.
    """
    try:
        stage = start_writing(out_dir)
        write_shards(plan, stream, stage)
        assets.copy_to(stage)
        (stage / "config.json").write_text(_config_text(stage, plan, rounded), encoding="utf-8")
        if plan.last_file == INDEX_FILE:
            (stage / INDEX_FILE).write_text(plan.index(), encoding="utf-8")
        if record:
            record(stage)
        publish(out_dir)
    except OSError as error:
        drain(stream)
        give_up(out_dir)
        what = f"the Hugging Face export to {out_dir} failed: {error}"
        why = f"it needs {plan.total_bytes / 2**30:.2f} GiB"
        do = "make room or choose another folder; the training checkpoint is not affected"
        return CheckpointError(what, why, do, code="save-failed")
    return None


def _config_text(folder: Path, plan: ExportPlan, rounded: RoundedFiles | None = None) -> str:
    """Return the model's configuration with the written dtype, under the key that it already uses.

    The written weights are quantised only as `rounded` says. They have layers that predict further tokens
    only if these are copied.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    if rounded is not None:
        config["quantization_config"] = rounded.configuration(plan.sources)
    lost = [] if any(map(predicts_further, plan.carried)) else NUM_FURTHER
    name = str(plan.dtype).removeprefix("torch.")
    config["dtype" if "dtype" in config else "torch_dtype"] = name
    for part in (config, *(config.get(part) for part in PART_OBJECTS)):  # the latter of a model with images
        if isinstance(part, dict):
            part.update({key: name for key in ("dtype", "torch_dtype") if key in part})
            part.update({key: 0 for key in lost if part.get(key)})
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def prepare_folder(shape: ModelShape, out_dir: Path, assets: HFAssets) -> Exception | None:
    """Check what can be wrong before tensors are sent. Return the first problem, or None."""
    try:
        reference = ModelShape.from_hf_dir(assets.model)
        for name, path in assets.files().items():
            if path != assets.tokenizer:  # which the user has named
                contained_file(path.parents[name.count("/")], name)
    except Exception as error:  # carried to all ranks and raised there
        return error
    differences = reference.differences(shape)
    if differences:
        what = f"{assets.model / 'config.json'} describes another model: {', '.join(differences)}"
        why = "the export takes its config.json from there"
        do = "pass the Hugging Face folder that the model was built from"
        return CheckpointError(what, why, do, code="checkpoint-of-another-model")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        overwritten = next(filter(out_dir.samefile, assets.folders), None)
        if overwritten is not None:
            what = f"the export would overwrite {overwritten}"
            why = "its configuration or its tokenizer is copied from there"
            return CheckpointError(what, why, OTHER_FOLDER, code="save-folder-taken")
        (start_writing(out_dir) / "probe").write_bytes(b"")
        give_up(out_dir)
    except OSError as error:
        what, why = f"cannot write to {out_dir}: {error}", "the export goes there"
        return CheckpointError(what, why, OTHER_FOLDER, code="save-not-writable")
    return None


def drain(stream: Iterator[object]) -> None:
    for _ in stream:
        pass


def raise_everywhere(context: ParallelContext, problem: Exception | None) -> None:
    """Raise global rank 0's problem on all ranks. The broadcast is also a barrier."""
    problem = context.broadcast_object(problem)
    if problem is not None:
        problem.on_all_ranks = True
        raise problem
