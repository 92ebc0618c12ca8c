"""Let ranks agree on an error before any of them continues: all ranks raise an error of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from mkd.errors import MkdError, UsageError

T = TypeVar("T")


def agree(problem: MkdError | None) -> None:
    """Raise the problem of the lowest rank that has one, on every rank. Collective."""
    problems: list[MkdError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raised = problem if rank == dist.get_rank() else found  # the local error keeps its traceback
            assert raised is not None
            raised.on_all_ranks = True
            raise raised


def require_same_choices(chosen: Mapping[str, object]) -> None:
    """Raise UsageError on every rank if ranks have chosen different values by themselves. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(chosen))
    for rank, other in enumerate(found):
        for name, value in found[0].items():
            if other[name] != value:
                problem = UsageError(
                    f"{name} is {value} on rank 0 and {other[name]} on rank {rank}",
                    "all ranks need the same; without the flag every rank chooses a value when it starts",
                    f"start again, or give {name} with the same value on all ranks",
                    code="ranks-chose-differently",
                )
                problem.on_all_ranks = True
                raise problem


def attempt(
    action: Callable[[], T], explain: Callable[[Exception], MkdError]
) -> tuple[T | None, MkdError | None]:
    """Return (result, problem) of an action without collectives.

    `explain` turns other errors into an MkdError.
    """
    try:
        return action(), None
    except MkdError as error:
        return None, error
    except Exception as error:
        problem = explain(error)
        problem.__cause__ = error
        return None, problem


def on_rank_0(action: Callable[[], T], explain: Callable[[Exception], MkdError]) -> T | None:
    """Return the result of `action` on rank 0 and None elsewhere; all ranks raise its error. Collective."""
    result, problem = attempt(action, explain) if dist.get_rank() == 0 else (None, None)
    agree(problem)
    return result


def together(action: Callable[[], T], explain: Callable[[Exception], MkdError]) -> T:
    """Return the result of `action` if it succeeds on every rank; otherwise all ranks raise. Collective."""
    result, problem = attempt(action, explain)
    agree(problem)
    return result  # type: ignore[return-value]  # if there is no result, agree raises
