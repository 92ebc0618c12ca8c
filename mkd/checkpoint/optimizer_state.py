"""The optimizer's part of a checkpoint, whichever Adam reads and writes it.

torch's AdamW counts its steps in the state of every parameter. The fused Adam of Transformer Engine and of
apex counts them in the parameter groups and holds only moments for a parameter. Either reads a checkpoint of
the other, so a run that began on CPUs can resume on GPUs. Settings are never loaded: the flags decide them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mkd.checkpoint.adapters import start_anew
from mkd.errors import CheckpointError

STATE_KEYS = ("params", "step")  # keys of a parameter group that are state; all others are settings
GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Settings that say which parameter group of a checkpoint is which of the run."""


def optimizer_kind(optimizer: MegatronOptimizer | None) -> str | None:
    """Return how Megatron stores the optimizer: the two forms cannot read each other's checkpoints."""
    if optimizer is None:
        return None
    distributed = any(isinstance(inner, DistributedOptimizer) for inner in optimizer.chained_optimizers)
    return "distributed" if distributed else "replicated"


def require_same_optimizer(
    folder: Path, saved: Mapping[str, Any], optimizer: MegatronOptimizer, precision: str
) -> None:
    """Raise CheckpointError if the state `saved` has no optimizer, or one of another kind or precision."""
    saved_kind, kind = saved.get("optimizer"), optimizer_kind(optimizer)
    if saved_kind is None:
        what, why = f"{folder} holds weights but no optimizer state", "--load continues a training run"
        raise CheckpointError(what, why, start_anew(folder), code="optimizer-state-differs")
    if saved_kind != kind:
        raise CheckpointError(
            f"{folder} holds a {saved_kind} optimizer, this run has a {kind} one",
            "Megatron writes the two in different forms",
            f"give or drop --use-distributed-optimizer as in the run that saved it, or {start_anew(folder)}",
            code="optimizer-state-differs",
        )
    saved_precision = saved.get("precision")
    if saved_precision not in (None, precision):  # None: written by an older version
        raise CheckpointError(
            f"{folder} is of a run in {saved_precision}, this one is in {precision}",
            "the optimizer's state has other parts in bf16 than in fp32",
            f"give or drop --bf16 as in the run that saved it, or {start_anew(folder)}",
            code="optimizer-state-differs",
        )


def give_first_state(optimizer: MegatronOptimizer) -> None:
    """Create zero moments at step 0 if there are none: Megatron saves and loads only existing state."""
    for inner in optimizer.chained_optimizers:
        adam = inner.optimizer
        if not isinstance(adam, torch.optim.Optimizer) or adam.state:
            continue
        for parameter in (one for group in adam.param_groups for one in group["params"]):
            state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            if _counts_by_parameter(adam):
                state["step"] = torch.tensor(0.0)
            adam.state[parameter] = state


def load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    """Load the state that Megatron has read. Modifies `loaded`.

    Weights of experts have an optimizer of their own; then `loaded` has a state for each by its number. All
    have made the same number of steps. Rank 0 saves it, whose pipeline stage may have no experts.
    """
    inner = optimizer.chained_optimizers
    states = [loaded] if len(inner) == 1 else [loaded[number] for number in range(len(inner))]
    step = max(_take_step(state.get("optimizer", state)) for state in states)
    for one, state in zip(inner, states, strict=True):
        _load_inner(one, state, step)


def _load_inner(inner: MegatronOptimizer, loaded: dict[Any, Any], step: int) -> None:
    """Load one optimizer, after `step` steps.

    With torch's AdamW, Megatron's distributed optimizer skips `step` when it reads and then asks for it. So
    the shared step is loaded first, with the groups, and is set aside while the moments are copied. At that
    point it is one tensor for all parameters, which AdamW would increment once for each of them. Every
    parameter therefore gets a copy.
    """
    moments = loaded.pop("param_state", None)  # the replicated optimizer has them in `state`
    _count_as(inner.optimizer, loaded.get("optimizer", loaded), step)
    _take_settings(loaded.get("optimizer", loaded), inner)
    inner.load_state_dict(loaded)
    if moments is None:
        return
    states = inner.optimizer.state.items()
    steps = {parameter: state.pop("step") for parameter, state in states if "step" in state}
    inner.load_parameter_state_from_fully_reshardable(moments)
    for parameter, shared in steps.items():
        inner.optimizer.state[parameter]["step"] = shared.clone()


def _take_settings(loaded: dict[Any, Any], inner: MegatronOptimizer) -> None:
    """Give the groups that were read the settings of this run, and no other ones.

    megatron-core 0.17 and later match groups by the learning rates in them, too, so that a run with another
    one would find no group.
    """
    own = {_group_key(group): group for group in inner.param_groups}
    for group in loaded["param_groups"]:
        settings = own.get(_group_key(group))
        if settings is None:
            continue  # Megatron says which groups differ
        state = {name: group[name] for name in STATE_KEYS if name in group}
        group.clear()
        group.update({name: value for name, value in settings.items() if name not in STATE_KEYS} | state)


def _group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in GROUP_KEYS)


def _counts_by_parameter(adam: torch.optim.Optimizer) -> bool:
    return isinstance(adam, torch.optim.AdamW)


def _take_step(loaded: dict[Any, Any]) -> int:
    """Remove and return the number of steps. Megatron does not save a step of 0."""
    state = loaded.get("state")
    steps = [group.pop("step") for group in loaded["param_groups"] if "step" in group]
    if state is not None and "common_step" in state:
        steps.append(state.pop("common_step"))
    return int(max(steps, default=0))


def _count_as(adam: torch.optim.Optimizer, loaded: dict[Any, Any], step: int) -> None:
    """Put the number of steps where `adam` keeps it."""
    state, groups = loaded.get("state"), loaded["param_groups"]
    if state is not None and _counts_by_parameter(adam):
        state["common_step"] = torch.tensor(float(step))
        return
    for group in groups:  # Megatron's distributed optimizer copies it into the state of torch's AdamW
        group["step"] = step
