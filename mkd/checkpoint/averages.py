"""Averages of the student's weights, which teachers have, in checkpoints.

Each is stored like a copy of the student in fp32, so that every layout can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from mkd.checkpoint.adapters import start_anew
from mkd.errors import CheckpointError

AVERAGES = "averages"  # entry of mkd.json: their number
TEACHERS = "teachers_of_averages"  # entry of mkd.json: the name of the teacher of each
UPDATES, STAGES = "updates", "stages"  # entries of each


class Average(Protocol):
    """An average of the student's weights, see mkd/train/moving_average.py."""

    teacher: str  # its name
    updates: int

    @property
    def names(self) -> list[frozenset[str]]:
        """Names of the averaged parameters of each stage."""

    def whole(self) -> list[dict[str, Tensor]]:
        """Return the average of each stage, fp32 by the names of the student's parameters. Collective."""

    def load(self, stages: Sequence[Mapping[str, Tensor]], updates: int) -> None:
        """Take what `whole` returned after so many updates."""


def key_of(number: int) -> str:
    """Return the key of the average of that number in a sharded state, and the prefix of its tensors."""
    return f"average{number}"


def averages_state(
    averages: Sequence[Average],
    models: Sequence[Mapping[str, Any]],  # sharded state of each stage of the student
    is_loading: bool,
    numbers: Sequence[int] | None = None,  # of each in the checkpoint, see `saved_numbers`; None: in order
) -> dict[str, Any]:
    """Return the sharded state of all averages. Collective."""
    found: dict[str, Any] = {}
    for number, one in zip(numbers or range(len(averages)), averages, strict=True):
        values = _empty(one, models) if is_loading else one.whole()
        stages = _stages(f"{key_of(number)}.", models, values)
        found[key_of(number)] = {UPDATES: one.updates, STAGES: stages}
    return found


def _stages(
    prefix: str, models: Sequence[Mapping[str, Any]], values: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    return [
        {name: _entry(prefix, model[name], value) for name, value in own.items()}
        for model, own in zip(models, values, strict=True)
    ]


def _entry(prefix: str, of_student: Any, value: Tensor) -> Any:
    changes: dict[str, Any] = dict(key=prefix + of_student.key, data=value)
    if not isinstance(of_student, ShardedTensorFactory):
        changes["dtype"] = value.dtype
    return replace(of_student, **changes)


def _empty(average: Average, models: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    pairs = zip(average.names, models, strict=True)
    return [{name: torch.zeros(model[name].data.shape) for name in names} for names, model in pairs]


def load_averages(averages: Sequence[Average], numbers: Sequence[int], loaded: Mapping[str, Any]) -> None:
    """Load all averages from the state that has been read."""
    for number, one in zip(numbers, averages, strict=True):
        state = loaded[key_of(number)]
        one.load(state[STAGES], state[UPDATES])


def saved_numbers(saved: Mapping[str, Any], teachers: Sequence[str]) -> list[int]:
    """Return the number in a checkpoint of the average of each teacher; -1: it holds none.

    Names decide, because a list of teachers may change its order. A single average belongs to the single
    teacher, whatever its name. Checkpoints of earlier versions have no names: there, places decide.
    """
    count = int(saved.get(AVERAGES, 0))
    known = saved.get(TEACHERS)
    if known is None or (count == 1 and len(teachers) == 1):
        return [number if number < count else -1 for number in range(len(teachers))]
    return [known.index(name) if name in known else -1 for name in teachers]


def averages_problem(
    folder: Path, saved: Mapping[str, Any], teachers: Sequence[str]
) -> CheckpointError | None:
    """Return an error if the checkpoint lacks the average of one of these teachers."""
    numbers = saved_numbers(saved, teachers)
    lacking = [name for name, number in zip(teachers, numbers, strict=True) if number < 0]
    if not lacking:
        return None
    known = saved.get(TEACHERS, [])
    held = f", but of {', '.join(known)}" if known else ""
    return CheckpointError(
        f"{folder} holds no average of the student's weights of teacher {', '.join(lacking)}{held}",
        "teachers of the run that saved it had other weights, or other names",
        f"restore them, or {start_anew(folder)}",
        code="optimizer-state-differs",
    )
