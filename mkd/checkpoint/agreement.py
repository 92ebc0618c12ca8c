"""One rank's trouble is everybody's: ranks agree on an error before any of them goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mkd.errors import MkdError

T = TypeVar("T")


def agree(problem: MkdError | None) -> None:
    """Raise on every rank what the first rank with a problem has met. Collective."""
    problems: list[MkdError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raised = problem if rank == dist.get_rank() else found  # ours has its traceback
            raised.on_all_ranks = True
            raise raised


def attempt(
    action: Callable[[], T], explain: Callable[[Exception], MkdError]
) -> tuple[T | None, MkdError | None]:
    """(result, problem) of an action that talks to no other rank; `explain` turns other errors into a user's."""
    try:
        return action(), None
    except MkdError as error:
        return None, error
    except Exception as error:
        problem = explain(error)
        problem.__cause__ = error
        return None, problem


def on_rank_0(action: Callable[[], T], explain: Callable[[Exception], MkdError]) -> T | None:
    """The result of `action` on rank 0, None elsewhere. What goes wrong there is raised by all. Collective."""
    result, problem = attempt(action, explain) if dist.get_rank() == 0 else (None, None)
    agree(problem)
    return result


def together(action: Callable[[], T], explain: Callable[[Exception], MkdError]) -> T:
    """The result of `action` on every rank, if it went well on all of them. Collective."""
    result, problem = attempt(action, explain)
    agree(problem)
    return result
