"""Megatron distributed checkpoints of the student: weights, optimizer, random states, data position.

Layout of a save directory:

    SAVE/iter_0000010/                a `torch_dist` checkpoint, readable at any TP x PP x DP layout
    SAVE/iter_0000010/mkd.json        iteration, consumed samples, layout, fingerprints (plain JSON)
    SAVE/iter_0000010/hf/             the student's config.json and generation config, the tokenizer:
                                      for the export to HF
    SAVE/iter_0000010/manifest.json   size and SHA-256 of every file
    SAVE/latest_checkpointed_iteration.txt    written last, replaced atomically

A checkpoint never contains the teacher. Of one that averages the student's weights it has the average.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from mkd.checkpoint.averages import (
    AVERAGES,
    TEACHERS,
    Average,
    averages_problem,
    averages_state,
    key_of,
    load_averages,
    saved_numbers,
)
from mkd.checkpoint.finite import first_not_finite
from mkd.checkpoint.folders import BY_STEPS, CAUSE, Retention, TrainingPosition, position_of, read_state
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_tower import TOWER
from mkd.checkpoint.main_weights import MainWeights
from mkd.checkpoint.optimizer_state import (
    give_first_state,
    load_optimizer,
    optimizer_kind,
    require_same_optimizer,
)
from mkd.checkpoint.saved_tower import lacks_tower, tower_problem
from mkd.checkpoint.saving import Contents, Save, announce_nothing
from mkd.checkpoint.verifying import verify
from mkd.errors import CheckpointError, first_line
from mkd.parallel.agreement import agree
from mkd.parallel.context import ParallelContext
from mkd.plan.models.lora_shape import is_factor

# State of modules that can have 8-bit scales. Megatron writes it; mkd has none and does not read it.
EXTRA_STATE = "_extra_state"
LAYERS = "decoder.layers."  # prefix of the names of layers in a model part
LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
STATE_AXES = ("pp", "tp", "dp")  # axes along which random states differ


def everything(name: str) -> bool:
    """Return True for every tensor."""
    return True


def base_alone(name: str) -> bool:
    """Return True for the tensors of a model without its adapters."""
    return not is_factor(name)


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that a checkpoint contains. Without optimizer: weights only (converted models)."""

    models: Sequence[MegatronModule]  # this rank's parts of the student, in virtual-stage order
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None  # not saved: its count follows from the position
    holds: Callable[[str], bool] = everything  # names of the models' tensors that a checkpoint contains
    averages: Sequence[Average] = ()  # of the student's weights, in teachers


def save_checkpoint(
    directory: Path,
    state: TrainingState,
    position: TrainingPosition,
    context: ParallelContext,
    assets: HFAssets | None,  # for the folder hf/; None: no such folder
    **more,
) -> Path:
    """Write `directory/iter_NNNNNNN`, move the pointer to it and return the folder. Collective.

    `more` goes to `start_save`. If one rank fails, all raise CheckpointError. The pointer and the earlier
    checkpoints then stay as they are.
    """
    return start_save(directory, state, position, context, assets, **more).write().finish()


def start_save(
    directory: Path,
    state: TrainingState,
    position: TrainingPosition,
    context: ParallelContext,
    assets: HFAssets | None,
    *,
    run_identity: Mapping[str, object] | None = None,  # fingerprints and settings, compared on resume
    open_interval: Mapping[str, object] | None = None,  # metrics of steps that no record has yet
    cause: str = BY_STEPS,  # why it is saved, see mkd.checkpoint.folders
    retention: Retention | None = None,  # None: every checkpoint stays
    copied: bool = False,
    announce: Callable[[str, int], None] = announce_nothing,  # called at each moment of the save
) -> Save:
    """Capture the current state, `copied` if training continues before it is written. Collective."""
    if state.optimizer is not None:  # before the state is captured, for a save before the first update
        give_first_state(state.optimizer)
    more = {"layout": _layout(context), "device": context.device.type}
    more |= {"optimizer": optimizer_kind(state.optimizer), "precision": _precision(state)}
    more |= {CAUSE: cause, **(run_identity or {})}
    if state.averages:
        more |= {AVERAGES: len(state.averages), TEACHERS: [one.teacher for one in state.averages]}
    more |= {"open_interval": dict(open_interval)} if open_interval else {}
    sharded = _sharded_state(state, context, is_loading=False)
    sharded["content_metadata"] = _content_metadata(context)
    contents = Contents(position, more, assets)
    return Save(directory, contents, context, retention or Retention(), announce).start(sharded, copied)


def load_checkpoint(
    folder: Path,
    state: TrainingState,
    context: ParallelContext,
    *,
    is_verified: bool = False,
    has_tower: bool = False,  # the models' towers have weights already, for a checkpoint without
    note: Callable[[str], None] = print,
) -> TrainingPosition:
    """Read `folder`, saved at any layout, into `state` and return its position. Collective.

    Compare the files with the manifest first, unless `is_verified`. Restore random states if layout and kind
    of device equal those of the save; otherwise the generators keep their seed. Raises CheckpointError for
    files that differ from the manifest or belong to another model, for tensors that are not finite, and for
    an optimizer of another kind, or of other weights than the model's. A checkpoint without the tower that a
    model has is of another model, unless `has_tower` and the tower is frozen.
    """
    if not is_verified:  # first: Megatron would run code that is hidden in a pickle of the checkpoint
        verify(folder, context, note)
    saved = read_state(folder)
    averaging = [one.teacher for one in state.averages]
    numbers = saved_numbers(saved, averaging)
    if state.optimizer is not None:
        require_same_optimizer(folder, saved, state.optimizer, _precision(state))
        agree(averages_problem(folder, saved, averaging))
        give_first_state(state.optimizer)  # Megatron reads only into state that exists
    no_tower = state.holds(TOWER) and _keeps_tower(folder, state, context, has_tower, note)
    wanted = _sharded_state(state, context, is_loading=True, no_tower=no_tower, averages=numbers)
    device = context.device.type  # generators of CPUs and GPUs cannot read each other's states
    if saved.get("layout") != _layout(context) or saved.get("device", device) != device:
        wanted.pop("rng", None)
    loaded = _read_sharded(folder, wanted, context)
    agree(_not_finite(folder, state.models, loaded, numbers))
    for index, model in enumerate(state.models):
        missing, unexpected = model.load_state_dict(loaded[f"model{index}"], strict=False)
        missing = [name for name in missing if state.holds(name) and not name.endswith(EXTRA_STATE)]
        missing = [name for name in missing if not (no_tower and name.startswith(TOWER))]
        assert not missing and not unexpected, (missing, unexpected)
    position = position_of(saved)
    if state.optimizer is not None:
        weights = MainWeights(state.optimizer)
        load_optimizer(state.optimizer, loaded["optimizer"])
        agree(weights.problem(folder))
        load_averages(state.averages, numbers, loaded)
        state.scheduler.num_steps = position.iteration - position.skipped_iterations
        state.scheduler.step(increment=0)
    if "rng" in loaded:
        _restore_random_states(loaded["rng"])
    return position


def _keeps_tower(
    folder: Path, state: TrainingState, context: ParallelContext, has_tower: bool, note: Callable[[str], None]
) -> bool:
    """Return True if a tower of this rank keeps its weights, because the checkpoint has none. Collective.

    Raises CheckpointError on all ranks for a tower that has no weights yet, and for one that is trained.
    """
    lacks = lacks_tower(folder, state.models)
    is_training = state.optimizer is not None
    agree(tower_problem(folder, state.models, is_training, has_tower) if lacks else None)
    if lacks and context.rank == 0:
        note(f"{folder} has no vision tower: the tower keeps the weights of the model's folder")
    return lacks


def load_layer_by_layer(
    folder: Path,
    models: Sequence[MegatronModule],  # this rank's parts of one model
    context: ParallelContext,
    layer_memory: Callable[[nn.Module], AbstractContextManager[None]],  # in it a decoder layer has memory
) -> None:
    """Read the weights in `folder`, saved at any layout, with one decoder layer in memory at a time.

    Collective. Files and errors are those of `load_checkpoint`. On one process all layers are in host memory
    first, because Megatron cannot read a part of a tensor of which nobody reads the rest.
    """
    verify(folder, context, print)
    _keeps_tower(folder, TrainingState(models), context, False, print)
    whole = [(model, "") for model in models]
    problems = [_read_weights(folder, whole, context, wants=lambda name: LAYERS not in name)]
    if context.world_size == 1:
        agree(problems[0])
        _load_through_host(folder, models, context, layer_memory)
        return
    layers = [
        (model, f"{LAYERS}{index}.", layer)
        for model in models
        for index, layer in enumerate(model.decoder.layers)
    ]
    rounds = torch.tensor(len(layers), device=context.device)
    torch.distributed.all_reduce(rounds, torch.distributed.ReduceOp.MAX)  # every read is collective
    for number in range(int(rounds)):
        if number < len(layers):
            model, prefix, layer = layers[number]
            with layer_memory(layer):
                problems.append(_read_weights(folder, [(model, prefix)], context))
        else:
            _read_weights(folder, [], context)
    agree(next(filter(None, problems), None))


def _load_through_host(
    folder: Path,
    models: Sequence[MegatronModule],
    context: ParallelContext,
    layer_memory: Callable[[nn.Module], AbstractContextManager[None]],
) -> None:
    """Read the decoder layers of each model to the host, and copy them one by one."""
    for model in models:
        sharded = model.sharded_state_dict(metadata=_content_metadata(context))
        names = [name for name in sharded if name.startswith(LAYERS) and not name.endswith(EXTRA_STATE)]
        for name in names:
            entry = sharded[name]
            entry.data = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="cpu")
        wanted = {name: sharded[name] for name in names}
        loaded = _read_sharded(folder, wanted, context, validate_access_integrity=False)
        agree(_not_finite(folder, [model], {"model0": loaded}))
        for index, layer in enumerate(model.decoder.layers):
            prefix = f"{LAYERS}{index}."
            with layer_memory(layer):
                own = {name: loaded.pop(name) for name in names if name.startswith(prefix)}
                model.load_state_dict(own, strict=False)


def _read_weights(
    folder: Path,
    parts: Sequence[tuple[MegatronModule, str]],
    context: ParallelContext,
    wants: Callable[[str], bool] = lambda name: True,
) -> CheckpointError | None:
    """Read the tensors of each model whose names start with a prefix and that `wants` accepts.

    Collective. Return the error for a tensor of this rank that is not finite.
    """
    wanted = {}
    for index, (model, prefix) in enumerate(parts):
        sharded = model.sharded_state_dict(metadata=_content_metadata(context))
        names = (name for name in sharded if name.startswith(prefix) and wants(name))
        wanted[f"model{index}"] = {name: sharded[name] for name in names if not name.endswith(EXTRA_STATE)}
    # A layer is a part of a stacked tensor, so that the reads of all ranks do not cover it.
    loaded = _read_sharded(folder, wanted, context, validate_access_integrity=False)
    for index, (model, _) in enumerate(parts):
        model.load_state_dict(loaded.get(f"model{index}", {}), strict=False)  # it may have nothing to read
    return _not_finite(folder, [model for model, _ in parts], loaded)


def _not_finite(
    folder: Path, models: Sequence[MegatronModule], loaded: Mapping[str, Any], averages: Sequence[int] = ()
) -> CheckpointError | None:
    """Return the error for a loaded tensor that is not finite, with its layer's number in the whole model."""
    others = {"optimizer", *map(key_of, averages)}
    named = {key: value for key, value in loaded.items() if key in others}
    for index, model in enumerate(models):

        def in_model(match: re.Match[str], first: int = model.first_layer) -> str:
            return f"{LAYERS}{first + int(match[1])}."

        weights = loaded.get(f"model{index}", {})
        named |= {LOCAL_LAYER.sub(in_model, name): tensor for name, tensor in weights.items()}
    return first_not_finite(str(folder), named)


def _read_sharded(
    folder: Path, wanted: dict[str, Any], context: ParallelContext, **options: bool
) -> dict[str, Any]:
    """Return the tensors of `folder` that a sharded state names. Collective. Raises CheckpointError."""
    try:
        reader = get_default_load_sharded_strategy(str(folder))
        strategy = FullyParallelLoadStrategyWrapper(reader, context.copies_group)
        return dist_checkpointing.load(wanted, str(folder), strategy, **options)
    except (Exception, CheckpointException) as error:  # the type depends on where a file is damaged
        raise CheckpointError(
            f"{folder} cannot be loaded: {_cause(error)}",
            "the checkpoint is damaged, or belongs to a model of another shape",
            "choose another checkpoint with --ckpt-step, or check that --student-hf names the right model",
            code="checkpoint-damaged",
        ) from error


def _cause(error: BaseException) -> str:
    """Return the first line, of the first rank's error if torch has wrapped the errors of ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


def _sharded_state(
    state: TrainingState,
    context: ParallelContext,
    is_loading: bool,
    no_tower: bool = False,
    averages: Sequence[int] | None = None,  # their numbers in the checkpoint that is read
) -> dict[str, Any]:
    metadata = _content_metadata(context)
    models = [model.sharded_state_dict(metadata=metadata) for model in state.models]
    for model in models:
        for name in [*model]:
            is_left_out = (is_loading and name.endswith(EXTRA_STATE)) or (no_tower and name.startswith(TOWER))
            if is_left_out or not state.holds(name):
                del model[name]
    sharded = {f"model{index}": weights for index, weights in enumerate(models)}
    if state.optimizer is not None:
        named = dict(sharded) if len(models) > 1 else {"model": models[0]}
        read = state.optimizer.sharded_state_dict
        sharded["optimizer"] = read(named, is_loading=is_loading, metadata=metadata)
        sharded["rng"] = _random_states(context)
        sharded |= averages_state(state.averages, models, is_loading, averages)
    return sharded


def _layout(context: ParallelContext) -> dict[str, int]:
    return {
        "tensor_parallel": context.tp_size,
        "pipeline_parallel": context.pp_size,
        "virtual_stages": context.virtual_stages,
        "data_parallel": context.dp_size,
    }


def _precision(state: TrainingState) -> str:
    """Return the precision of the parameters: only for bf16 does the optimizer have fp32 copies."""
    return "bf16" if state.models[0].config.bf16 else "fp32"


def _content_metadata(context: ParallelContext) -> dict[str, Any]:
    """Return the optimizer's layout on disk: whole parameters, so that every layout can read it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": context.copies_group,
    }


def _random_states(context: ParallelContext) -> ShardedObject:
    """Return the states of all generators, one per (pipeline, tensor, data) rank."""
    states = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if context.platform.is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    own = [context.axes[name] for name in STATE_AXES]
    shape, place = tuple(axis.size for axis in own), tuple(axis.rank for axis in own)
    return ShardedObject("rng", states, shape, place, replica_id=(context.cp.rank,))


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
