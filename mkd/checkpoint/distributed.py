"""Megatron distributed checkpoints of the student: weights, optimizer, random states, data position.

Layout of a save directory:

    SAVE/iter_0000010/               a `torch_dist` checkpoint, readable at any TP x PP x DP layout
    SAVE/iter_0000010/mkd.json       iteration, consumed samples, layout, fingerprints (plain JSON)
    SAVE/iter_0000010/hf/            config.json and generation config of the student, the run's tokenizer: the way back to HF
    SAVE/iter_0000010/manifest.json  size and SHA-256 of every file
    SAVE/latest_checkpointed_iteration.txt    written last, replaced atomically

The teacher is never part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint import CheckpointException

from mkd.checkpoint.folders import (
    HF_FOLDER,
    POINTER,
    Retention,
    TrainingPosition,
    find_checkpoint,
    position_of,
    read_state,
)
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.optimizer_state import give_first_state, load_optimizer
from mkd.checkpoint.saving import Contents, Save, announce_nothing
from mkd.checkpoint.verifying import verify
from mkd.errors import CheckpointError
from mkd.parallel.context import ParallelContext

__all__ = [
    "HF_FOLDER",
    "POINTER",
    "TrainingPosition",
    "TrainingState",
    "find_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "start_save",
]

EXTRA_STATE = "_extra_state"  # of modules that can have 8-bit scales, written as Megatron does; not read: there are none


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that a checkpoint holds. Without optimizer: weights only (converted models)."""

    models: Sequence[MegatronModule]  # this rank's student chunks, in virtual-stage order
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = (
        None  # counts updates: it follows from the position, and is not saved
    )


def save_checkpoint(
    directory: Path,
    state: TrainingState,
    position: TrainingPosition,
    context: ParallelContext,
    assets: HFAssets | None,  # for the folder hf/; None: there is none
    **more,
) -> Path:
    """Write `directory/iter_NNNNNNN` and then move the pointer to it; returns the folder. Collective.

    `more` is that of `start_save`. What goes wrong on one rank is raised, as CheckpointError, by all; the pointer and the
    checkpoints that were there before are then untouched.
    """
    return start_save(directory, state, position, context, assets, **more).write().finish()


def start_save(
    directory: Path,
    state: TrainingState,
    position: TrainingPosition,
    context: ParallelContext,
    assets: HFAssets | None,
    *,
    run_identity: Mapping[str, object]
    | None = None,  # fingerprints and settings, compared when a run resumes
    open_interval: Mapping[str, object] | None = None,  # metrics of steps that are in no record yet
    retention: Retention | None = None,  # None: every checkpoint stays
    copied: bool = False,
    announce: Callable[[str, int], None] = announce_nothing,  # told of the moments of the save
) -> Save:
    """Take the state as it is now, `copied` where training goes on before it is written. Collective."""
    if state.optimizer is not None:
        give_first_state(state.optimizer)
    more = {
        "layout": _layout(context),
        "device": _device(context),
        "optimizer": _kind(state),
        "precision": _precision(state),
    }
    more |= run_identity or {}
    more |= {"open_interval": dict(open_interval)} if open_interval else {}
    sharded = _sharded_state(state, context, is_loading=False) | {
        "content_metadata": _content_metadata(context)
    }
    contents = Contents(position, more, assets)
    return Save(directory, contents, context, retention or Retention(), announce).start(sharded, copied)


def load_checkpoint(
    folder: Path,
    state: TrainingState,
    context: ParallelContext,
    *,
    is_verified: bool = False,
    note: Callable[[str], None] = print,
) -> TrainingPosition:
    """Read `folder` into `state`, whatever layout it was saved at. Called by all ranks; returns its position.

    Its files are compared with the manifest first, unless they have just been. Random states are restored when layout and
    kind of device are those of the save, else the generators keep their seed. Raises CheckpointError for files that differ
    from the manifest or belong to another model, and for an optimizer of another kind.
    """
    if not is_verified:
        verify(folder, context, note)
    saved = read_state(folder)
    if state.optimizer is not None:
        _require_same_kind(folder, saved.get("optimizer"), _kind(state))
        _require_same_precision(folder, saved.get("precision"), _precision(state))
        give_first_state(state.optimizer)
    wanted = _sharded_state(state, context, is_loading=True)
    if saved.get("layout") != _layout(context) or saved.get("device", _device(context)) != _device(context):
        wanted.pop("rng", None)
    try:
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(folder)), context.dp_cp_group
        )
        loaded = dist_checkpointing.load(wanted, str(folder), strategy)
    except (
        Exception,
        CheckpointException,
    ) as error:  # what a damaged file raises depends on where it is damaged
        raise CheckpointError(
            f"{folder} cannot be loaded: {_first_line(error)}",
            "the checkpoint is damaged, or belongs to a model of another shape",
            "choose another checkpoint with --ckpt-step, or check that --student-hf names the model it was made from",
            code="checkpoint-not-loadable",
        ) from error
    for index, model in enumerate(state.models):
        missing, unexpected = model.load_state_dict(loaded[f"model{index}"], strict=False)
        assert not [name for name in missing if not name.endswith(EXTRA_STATE)] and not unexpected, (
            missing,
            unexpected,
        )
    position = position_of(saved)
    if state.optimizer is not None:
        load_optimizer(state.optimizer, loaded["optimizer"])
        state.scheduler.num_steps = position.iteration - position.skipped_iterations
        state.scheduler.step(increment=0)
    if "rng" in loaded:
        _restore_random_states(loaded["rng"])
    return position


def _first_line(error: BaseException) -> str:
    """The cause in one line. torch wraps what its ranks met in a BaseException whose text is their tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sharded_state(state: TrainingState, context: ParallelContext, is_loading: bool) -> dict:
    metadata = _content_metadata(context)
    models = [model.sharded_state_dict(metadata=metadata) for model in state.models]
    if is_loading:
        models = [
            {name: entry for name, entry in model.items() if not name.endswith(EXTRA_STATE)}
            for model in models
        ]
    sharded = {f"model{index}": weights for index, weights in enumerate(models)}
    if state.optimizer is not None:
        named = dict(sharded) if len(models) > 1 else {"model": models[0]}
        sharded["optimizer"] = state.optimizer.sharded_state_dict(
            named, is_loading=is_loading, metadata=metadata
        )
        sharded["rng"] = _random_states(context)
    return sharded


def _layout(context: ParallelContext) -> dict[str, int]:
    return {
        "tensor_parallel": context.tp_size,
        "pipeline_parallel": context.pp_size,
        "virtual_stages": context.virtual_stages,
        "data_parallel": context.dp_size,
    }


def _device(context: ParallelContext) -> str:
    """Whose random states it has: generators of CPUs and GPUs cannot read each other's."""
    return context.device.type


def _kind(state: TrainingState) -> str | None:
    """How Megatron stores the optimizer: the two forms cannot read each other's checkpoints."""
    if state.optimizer is None:
        return None
    distributed = any(isinstance(inner, DistributedOptimizer) for inner in state.optimizer.chained_optimizers)
    return "distributed" if distributed else "replicated"


def _require_same_kind(folder: Path, saved: str | None, wanted: str) -> None:
    if saved is None:
        raise CheckpointError(
            f"{folder} holds weights but no optimizer state",
            "--load continues a training run",
            "start a run from its weights with --student-load",
            code="optimizer-state-missing",
        )
    if saved != wanted:
        raise CheckpointError(
            f"{folder} holds a {saved} optimizer, this run has a {wanted} one",
            "Megatron writes the two in different forms",
            "give or drop --use-distributed-optimizer as in the run that saved it, or start anew with --student-load",
            code="optimizer-kind-differs",
        )


def _precision(state: TrainingState) -> str:
    """Of the parameters: beside those in bf16 an optimizer has fp32 copies, so that the two cannot read each other's either."""
    return "bf16" if state.models[0].config.bf16 else "fp32"


def _require_same_precision(folder: Path, saved: str | None, wanted: str) -> None:
    if saved not in (None, wanted):  # None: of an older version
        raise CheckpointError(
            f"{folder} is of a run in {saved}, this one is in {wanted}",
            "the optimizer's state has other parts in bf16 than in fp32",
            "give or drop --bf16 as in the run that saved it, or start anew with --student-load",
            code="checkpoint-precision-differs",
        )


def _content_metadata(context: ParallelContext) -> dict:
    """How the optimizer is laid out on disk: whole parameters, so that every layout can read it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": context.dp_cp_group,
    }


def _random_states(context: ParallelContext) -> ShardedObject:
    """States of torch's generators and Megatron's tracker, one per (pipeline, tensor, data) rank."""
    states = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if context.platform.is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "rng",
        states,
        (context.pp_size, context.tp_size, context.dp_size),
        (context.pp_rank, context.tp_rank, context.dp_rank),
        replica_id=context.cp_rank,
    )


def _restore_random_states(states: dict) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
