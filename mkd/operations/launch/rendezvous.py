"""Let all ranks meet once before they build anything.

A problem with one machine's disk or files then ends all ranks. They meet at the store of torchrun's
environment, which needs neither a process group nor a GPU.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from mkd.errors import MkdError

if TYPE_CHECKING:  # it takes seconds
    import torch.distributed as dist

T = TypeVar("T")

PREFIX = "mkd/start"
LINGER_S = 5.0  # how long rank 0, which may host the store, waits for ranks that have not read it yet
POLL_S = 0.02
GATHER_POLL_S = 0.1  # all ranks poll the one store


@dataclass(frozen=True)
class Problem:
    """The reason why a rank cannot start."""

    exit_code: int
    what: str  # one line
    text: str  # the whole text, equal on all ranks that hit the same problem


class PeerCannotStart(MkdError):
    """Another rank has a problem, which it prints itself; all ranks end with its exit code."""

    on_all_ranks = True

    def __init__(self, rank: int, problem: Problem):
        what = f"stopped because rank {rank} cannot start: {problem.what}"
        super().__init__(what, do="see the error of that rank", code="peer-cannot-start")
        self.exit_code = problem.exit_code


@dataclass
class Rendezvous:
    """The meeting of all ranks of a run that has just started."""

    rank: int
    world_size: int
    is_over: bool = False  # over or under way
    _store: dist.Store | None = None  # kept, because the process group will use the same one

    def ready(self, timeout_s: float) -> None:
        """Report that this rank can start. Collective. Raises PeerCannotStart if another one cannot."""
        problems = self.exchange(None, timeout_s)
        if problems:
            rank = min(problems)
            raise PeerCannotStart(rank, problems[rank])

    def exchange(self, problem: Problem | None, timeout_s: float) -> dict[int, Problem]:
        """Report why this rank cannot start (None: it can), and return {rank: problem} of all ranks.

        Collective. Raises an error of torch.distributed if the other ranks do not come within `timeout_s`.
        """
        self.is_over = True
        if self.world_size == 1:
            return {} if problem is None else {0: problem}
        import torch.distributed as dist

        if dist.is_initialized():  # the caller initialised it
            answers: list[Problem | None] = [None] * self.world_size
            dist.all_gather_object(answers, problem)
        else:
            answers = self._at_store(problem, timeout_s)
        return {rank: answer for rank, answer in enumerate(answers) if answer is not None}

    def gather(self, name: str, value: T, timeout_s: float) -> list[T]:
        """Return the values (JSON) of all ranks, by rank, before they are ready. Once for a name.

        Collective. Raises PeerCannotStart if another rank cannot even come here, and an error of
        torch.distributed if the other ranks do not come within `timeout_s`.
        """
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        if dist.is_initialized():
            answers: list[T] = [value] * self.world_size
            dist.all_gather_object(answers, value)
            return answers
        store = self._open(timeout_s)
        place, start = dist.PrefixStore(f"{PREFIX}/{name}", store), dist.PrefixStore(PREFIX, store)
        place.set(str(self.rank), json.dumps(value))
        ranks, deadline = list(map(str, range(self.world_size))), time.monotonic() + timeout_s
        while not place.check(ranks) and time.monotonic() < deadline:
            # Only then: a rank that has all values may be ready already.
            if any(start.check([rank]) for rank in ranks) and not place.check(ranks):
                self.ready(timeout_s)
            time.sleep(GATHER_POLL_S)
        return _values(place, ranks)

    def _open(self, timeout_s: float) -> dist.Store:
        from mkd.parallel.start_store import start_store

        self._store = start_store(timedelta(seconds=timeout_s))
        return self._store

    def _at_store(self, problem: Problem | None, timeout_s: float) -> list[Problem | None]:
        import torch.distributed as dist

        place = dist.PrefixStore(PREFIX, self._open(timeout_s))
        place.set(str(self.rank), json.dumps(problem and asdict(problem)))
        found = _values(place, list(map(str, range(self.world_size))))
        answers = [Problem(**answer) if answer else None for answer in found]
        deadline = time.monotonic() + LINGER_S
        num_done = place.add("done", 1)
        while self.rank == 0 and any(answers) and num_done < self.world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
            num_done = place.add("done", 0)
        return answers


def _values(place: dist.Store, keys: list[str]) -> list[Any]:
    """Return the values (JSON) of all keys. Waits for them as long as the store does."""
    return [json.loads(text) for text in place.multi_get(keys)]
