"""The settings of a teacher on processes of its own: how many, in which layout, and how far ahead."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import NOT_NEGATIVE, Range, option

AUTO = -1
"""Number of processes that stands for `auto`, until mkd/run/chosen_place.py has replaced it."""

_POSITIVE = Range("1 or more", lambda x: x >= 1)


@dataclass(frozen=True)
class ApartSettings:
    """The processes of a teacher. They change no results beyond the rounding of its layout."""

    processes: int = option(
        0,
        "processes that run this teacher alone. The launch has the student's processes first, then those "
        "of each such teacher. 0: the teacher shares the student's processes. auto: the split and layout "
        "that mkd plan finds, if a step then takes at most 0.97 of the time. Otherwise the best place on "
        "shared processes. auto needs --global-batch-size and, on a machine without GPUs, "
        "--device-memory-gib",
        valid=NOT_NEGATIVE,
        words={"auto": AUTO},
    )
    tensor_model_parallel_size: int | None = option(
        None,
        "processes that share every matrix of a teacher on --teacher-processes, with sequence parallelism "
        "(default: 1)",
        valid=_POSITIVE,
    )
    pipeline_model_parallel_size: int | None = option(
        None,
        "processes that share the layers of a teacher on --teacher-processes (default: 1)",
        valid=_POSITIVE,
    )
    context_parallel_size: int | None = option(
        None,
        "processes that share every sequence of a teacher on --teacher-processes (default: 1)",
        valid=_POSITIVE,
    )
    ahead: int | None = option(
        None,
        "micro-batches that the student asks a teacher on --teacher-processes for before their loss, 2 or "
        "more (default: enough to fill the teacher's pipeline)",
        valid=Range("2 or more", lambda x: x >= 2),
    )
