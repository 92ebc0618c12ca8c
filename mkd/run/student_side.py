"""A launch with teachers on processes of their own: watch all sides, meet the teachers, and end them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from mkd.config.options import flat_settings
from mkd.config.schema import Config
from mkd.errors import EXIT_DONE, MkdError, UsageError
from mkd.operations.failures import FailureReports
from mkd.operations.heartbeat import Heartbeat
from mkd.operations.signals import Signals
from mkd.operations.watchdog import MARGIN_S, Watchdog
from mkd.parallel.context import ParallelContext
from mkd.parallel.side_groups import Launch
from mkd.parallel.side_links import SideLinks
from mkd.parallel.start_store import start_store
from mkd.plan.sides import Side, apart_teachers, sides_of, teacher_sizes
from mkd.train.remote_states import RemoteStates
from mkd.train.teacher_idle import TeacherIdle, take_rows


def launch_timeout(config: Config) -> timedelta:
    """Return how long process groups wait: longer than the watchdog, whose report says more."""
    return timedelta(minutes=config.parallel.distributed_timeout_minutes, seconds=MARGIN_S)


def meet_launch(config: Config, rank: int, size: int) -> Launch:
    """Return the launch of `size` processes, of which this one is `rank`. Collective.

    Raises UsageError on all of them if they were started with other settings: sides have other machines, and
    in Slurm's heterogeneous jobs other commands.
    """
    launch = Launch.meet(rank, size, launch_timeout(config))
    require_same_settings(launch.gather("settings", comparable_settings(config)))
    return launch


def comparable_settings(config: Config) -> dict[str, str]:
    """Return path -> value of the settings, without places of files: machines may have others."""
    values = {path: json.dumps(value, default=str) for path, value in flat_settings(config).items()}
    return {path: value for path, value in values.items() if os.sep not in value}


def require_same_settings(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise UsageError if processes have other values of a setting than the first one."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for path in (one for one in first if one in other and first[one] != other[one]):
            what = f"{path} is {first[path]} on rank 0 and {other[path]} on rank {rank}"
            why = "all sides need the same settings: the rows and states that they exchange follow from them"
            error = UsageError(what, why, "start all with the same command", code="ranks-chose-differently")
            error.on_all_ranks = True
            raise error


def heartbeat_of(config: Config, side: Side, reports: FailureReports, signals: Signals | None) -> Heartbeat:
    """Return the signs of life of a process of `side`. The first process of a side reads the other sides."""
    own = range(side.first, side.first + side.size)
    others = tuple(rank for rank in range(reports.world_size) if rank not in own)
    return Heartbeat(
        start_store(launch_timeout(config)),
        reports.rank,
        reports.world_size,
        others if reports.rank == side.first else (),
        signals=signals,
        obeys=side.teacher is None,
    )


def links_of_student(config: Config, launch: Launch, context: ParallelContext) -> dict[int, SideLinks]:
    """Meet all teachers on processes of their own, one after the other. Collective on all sides."""
    names = {side.teacher: side.name for side in sides_of(config, launch.size)}
    return {
        index: SideLinks.open(launch, names[index], context, teacher_sizes(teacher), is_teacher=False)
        for index, teacher in apart_teachers(config).items()
    }


def idle_share(
    config: Config, teachers: Sequence[RemoteStates], context: ParallelContext, watchdog: Watchdog
) -> Callable[[float], float | None]:
    """Return what turns the time of an interval's steps into `teacher_idle_share`, on rank 0. Collective."""
    heartbeat = watchdog.heartbeat
    if heartbeat is None:
        return lambda step_ms: None
    idle = TeacherIdle(lambda: heartbeat.said, teacher_replicas(config, heartbeat.size))

    def share(step_ms: float) -> float | None:
        rows = take_rows(teachers, context)
        return idle.share(rows, step_ms) if context.rank == 0 else None

    return share


def teacher_replicas(config: Config, world_size: int) -> list[list[list[int]]]:
    """Return the ranks in the launch of each replica of each teacher on processes of its own."""
    found = []
    for side in sides_of(config, world_size)[1:]:
        assert side.teacher is not None, "the student's side is the first"
        sizes, replicas = teacher_sizes(config.teachers[side.teacher]), []
        for replica in range(sizes.data):  # Megatron counts tp, cp, dp, then pp
            own = [rank for rank in range(side.size) if rank // sizes.row % sizes.data == replica]
            replicas.append([side.first + rank for rank in own])
        found.append(replicas)
    return found


def end_teachers(teachers: Sequence[RemoteStates], error: BaseException | None) -> None:
    """Let the teachers' processes end as this side does. They find the report of an error of some ranks."""
    if error is None or (isinstance(error, MkdError) and error.on_all_ranks):
        for one in teachers:
            one.stop(EXIT_DONE if error is None else error.exit_code)
