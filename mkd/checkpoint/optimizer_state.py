"""The optimizer's part of a checkpoint, whichever Adam reads and writes it.

torch's AdamW counts its steps in the state of every parameter; the fused Adam of Transformer Engine, and of apex, counts
them in the parameter groups, and holds nothing but moments for a parameter. A checkpoint of one is a checkpoint of the other:
what was begun on CPUs goes on on GPUs. Settings are never loaded: they are those of the flags.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer

OF_STATE = ("params", "step")  # of a parameter group; the rest are settings


def give_first_state(optimizer: MegatronOptimizer) -> None:
    """Zero moments at step 0, where it has never been used: Megatron saves and loads what is there, and does not make it."""
    for inner in optimizer.chained_optimizers:
        adam = inner.optimizer
        if not isinstance(adam, torch.optim.Optimizer) or adam.state:
            continue
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = {
                    name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
                }
                if _counts_by_parameter(adam):
                    adam.state[parameter]["step"] = torch.tensor(0.0)


def load_optimizer(optimizer: MegatronOptimizer, loaded: dict) -> None:
    """Hand the state that Megatron has read, which is taken apart on the way, to the one optimizer of a dense student.

    Over torch's AdamW, Megatron's distributed optimizer skips `step` in what it reads and then asks for it. So the shared
    step goes in first, with the groups, and is set aside while the moments are copied. It is one tensor for all parameters
    then, which AdamW would increment once for each of them: every parameter gets its own.
    """
    (inner,) = optimizer.chained_optimizers
    moments = loaded.pop(
        "param_state", None
    )  # of the distributed optimizer; the others have it in the `state` of below
    _count_as(inner.optimizer, loaded.get("optimizer", loaded))
    settings = [
        {name: value for name, value in group.items() if name not in OF_STATE} for group in inner.param_groups
    ]
    inner.load_state_dict(loaded)
    for group, own in zip(inner.param_groups, settings, strict=True):
        for name in group.keys() - own.keys() - set(OF_STATE):
            del group[name]  # a setting of the other Adam
        group.update(own)
    if moments is None:
        return
    steps = {
        parameter: state.pop("step") for parameter, state in inner.optimizer.state.items() if "step" in state
    }
    inner.load_parameter_state_from_fully_reshardable(moments)
    for parameter, step in steps.items():
        inner.optimizer.state[parameter]["step"] = step.clone()


def _counts_by_parameter(adam: torch.optim.Optimizer) -> bool:
    return isinstance(adam, torch.optim.AdamW)


def _count_as(adam: torch.optim.Optimizer, loaded: dict) -> None:
    """Put the number of steps where `adam` has it. Megatron does not save a step that is 0."""
    state, groups = loaded.get("state"), loaded["param_groups"]
    steps = [group.pop("step") for group in groups if "step" in group]
    if state is not None and "common_step" in state:
        steps.append(state.pop("common_step"))
    step = int(max(steps, default=0))
    if state is not None and _counts_by_parameter(adam):
        state["common_step"] = torch.tensor(float(step))
        return
    for group in groups:  # Megatron's distributed optimizer moves it on into the state of torch's AdamW
        group["step"] = step
