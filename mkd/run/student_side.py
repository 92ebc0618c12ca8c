"""The student's side of a launch with teachers on processes of their own: meet them, and end them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mkd.config.schema import Config
from mkd.errors import EXIT_DONE, MkdError
from mkd.operations.watchdog import MARGIN_S
from mkd.parallel.context import ParallelContext
from mkd.parallel.side_groups import Launch
from mkd.parallel.side_links import SideLinks
from mkd.plan.sides import apart_teachers, sides_of, teacher_sizes
from mkd.train.remote_states import RemoteStates


def launch_timeout(config: Config) -> timedelta:
    """Return how long process groups wait: longer than the watchdog, whose report says more."""
    return timedelta(minutes=config.parallel.distributed_timeout_minutes, seconds=MARGIN_S)


def meet_launch(config: Config, rank: int, size: int) -> Launch:
    """Return the launch of `size` processes, of which this one is `rank`."""
    return Launch.meet(rank, size, launch_timeout(config))


def links_of_student(config: Config, launch: Launch, context: ParallelContext) -> dict[int, SideLinks]:
    """Meet all teachers on processes of their own, one after the other. Collective on all sides."""
    names = {side.teacher: side.name for side in sides_of(config, launch.size)}
    return {
        index: SideLinks.open(launch, names[index], context, teacher_sizes(teacher), is_teacher=False)
        for index, teacher in apart_teachers(config).items()
    }


def end_teachers(teachers: Sequence[RemoteStates], error: BaseException | None) -> None:
    """Let the teachers' processes end as this side does. They find the report of an error of some ranks."""
    if error is None or (isinstance(error, MkdError) and error.on_all_ranks):
        for one in teachers:
            one.stop(EXIT_DONE if error is None else error.exit_code)
