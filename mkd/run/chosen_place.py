"""Resolve --teacher-processes auto before a run starts: the same place of the teacher on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mkd.checkpoint.folders import REPLICAS, SETTINGS, find_checkpoint, read_state
from mkd.config.load import LoadedConfig
from mkd.config.models import APART, CHOSEN_WITH_PROCESSES
from mkd.config.options import FIRST_TEACHER, all_options
from mkd.config.schema import Config
from mkd.errors import CheckpointError, ErrorList, MkdError
from mkd.human import counted
from mkd.kinds.known_kinds import KINDS
from mkd.operations.console import LOG
from mkd.operations.launch.rendezvous import Rendezvous
from mkd.plan.advice.auto_processes import (
    FLAG,
    ChosenPlace,
    choose_place,
    is_open,
    memory_unknown,
    open_problems,
)
from mkd.plan.facts import RunFacts
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.sides import LAYOUT
from mkd.plan.times.hardware import MACHINE, USABLE
from mkd.run.early_checks import find_shape


def with_place(loaded: LoadedConfig, rendezvous: Rendezvous, patience_s: float) -> LoadedConfig:
    """Return the settings of a run with the place that rank 0 chooses, if they leave it open. Collective.

    The memory is that of the smallest GPU of the run, or --device-memory-gib. Raises what keeps the plan from
    choosing.
    """
    config = loaded.config
    if not is_open(config):
        return loaded
    gib = config.device_memory_gib
    if gib is None:
        every = rendezvous.gather("GPU memory", _gpu_gib(config), patience_s)
        gib = min((one for one in every if one is not None), default=None) if all(every) else None
    world_size = rendezvous.world_size
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    found, error = None, None
    if rendezvous.rank == 0:
        try:
            refuse(open_problems(config))
            found = kept_place(config, world_size) or planned_place(config, world_size, gib, machine)
        except Exception as problem:  # raised below: the other ranks wait here
            error = problem
    (values, *_) = rendezvous.gather(FLAG, found and asdict(found), patience_s)
    if error is not None:
        raise error
    # Without values this rank has the error of rank 0, or learns of it at the rendezvous.
    place = ChosenPlace(**values) if values else planned_place(config, world_size, gib, machine)
    LOG.info(place.text)
    chosen = {f"{FIRST_TEACHER}.{name}": FLAG for name in ("processes", *place.settings)}
    return replace(loaded, config=place.apply(config), origins={**loaded.origins, **chosen})


def planned_place(
    config: Config, world_size: int, device_memory_gib: float | None, machine: int = MACHINE
) -> ChosenPlace:
    """Return the place of the teacher that a plan chooses on so many processes.

    Raises ErrorList if it cannot.
    """
    refuse(open_problems(config))
    if device_memory_gib is None:
        raise memory_unknown()
    problems: list[MkdError] = []
    shared = ChosenPlace({}, "").apply(config)
    shapes = [find_shape(problems, shared, number) for number in (None, 0)]
    refuse(problems)
    student, teacher = shapes
    facts = RunFacts(shared, world_size, student, (teacher,), kinds=KINDS)
    return choose_place(facts, USABLE * device_memory_gib, machine)


def kept_place(config: Config, world_size: int) -> ChosenPlace | None:
    """Return the split of the run that saved the checkpoint to load, if it had as many processes.

    None if it had no split, or another layout of the student. A checkpoint that cannot be read is reported
    later.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        return None
    saved: dict[str, Any] = {}
    with suppress(CheckpointError):
        folder = find_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
        saved = read_state(folder).get(SETTINGS, {}) if folder else {}
    places = {one.field: one.place for one in all_options() if one.section == FIRST_TEACHER}
    chosen = {name: saved.get(places[name]) for name in CHOSEN_WITH_PROCESSES}
    then = {name: saved.get(f"--{name.replace('_', '-')}") for name in LAYOUT}
    processes, replicas = chosen[APART] or 0, saved.get(REPLICAS) or 0
    is_as_then = then == {name: getattr(config.parallel, name) for name in LAYOUT}
    is_as_then &= processes + replicas * Sizes.of(config.parallel).replica == world_size
    if not (processes and is_as_then):
        return None
    return ChosenPlace(chosen, f"{FLAG}: {counted(processes, 'process')}, as in the checkpoint {folder}")


def refuse(problems: Iterable[MkdError]) -> None:
    """Raise ErrorList if there are problems."""
    if found := list(problems):
        raise ErrorList(found)


def _gpu_gib(config: Config) -> float | None:
    from mkd.platform import detect, gpu_gib, make_deterministic

    if config.training.deterministic_mode:  # before the first CUDA call, which is here
        make_deterministic()
    detect()
    return gpu_gib()
