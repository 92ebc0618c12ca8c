"""Let ranks agree on an error before any of them continues: all ranks raise an error of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mkd.errors import MkdError

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
