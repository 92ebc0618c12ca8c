"""Pass the hidden states of a teacher that has processes of its own from rank to rank of its pipeline.

Two communicators take turns, state by state. Over a single one, a send that waits for its receiver would hold
up the next receive.

Elements of a message: T * h of the teacher, divided over cp, and over tp with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.parallel.context import ParallelContext

COMMUNICATORS = 2


@dataclass
class StateLinks:
    """The links of this process: from the rank before, and to the next one."""

    shapes: tuple[tuple[int, ...], ...]  # of each teacher's state, [t_i / cp (/ tp), 1, h_i]
    dtype: torch.dtype
    device: torch.device
    groups: tuple[dist.ProcessGroup, ...]  # by turns, over all ranks of the pipeline
    before: int | None  # rank of the pipeline; None: this is the first
    behind: int | None  # None: this is the last
    _received: int = 0
    _sent: int = 0
    _sending: list[tuple[list[dist.Work], Sequence[Tensor]]] = field(default_factory=list)

    @classmethod
    def build(
        cls, context: ParallelContext, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> StateLinks:
        """Make the communicators, and use each once in every direction. Collective.

        Used first in a step, a communicator would make its rank wait for the other one at another place.
        """
        groups = tuple(context.pipeline_group(number) for number in range(COMMUNICATORS))
        rank, last = context.pp_rank, context.pp_size - 1
        before, behind = rank - 1 if rank else None, rank + 1 if rank < last else None
        links = cls(tuple(shapes), dtype, context.device, groups, before, behind)
        for _ in groups:
            if before is not None:
                links.receive()
            if behind is not None:
                links.send([torch.zeros(shape, dtype=dtype, device=context.device) for shape in shapes])
            links.wait_for_sends()
        return links

    def receive(self, shapes: Sequence[tuple[int, ...]] | None = None) -> tuple[Tensor, ...]:
        """Return the next states of the rank before: the device waits for them. No part of any backward.

        `shapes` are those of the states, if they differ from `self.shapes`.
        """
        assert self.before is not None, "the first rank receives no states"
        shapes = self.shapes if shapes is None else shapes
        states = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        for request in self._posted(dist.irecv, states, self.before, self._received):
            request.wait()
        self._received += 1
        return tuple(states)

    def send(self, states: Sequence[Tensor]) -> None:
        """Send states to the next rank, without waiting."""
        assert self.behind is not None, "the last rank sends no states"
        self._sending[:] = [one for one in self._sending if not all(work.is_completed() for work in one[0])]
        self._sending.append((self._posted(dist.isend, states, self.behind, self._sent), states))
        self._sent += 1

    def _posted(
        self, operation: Callable[..., Any], states: Sequence[Tensor], peer: int, number: int
    ) -> list[dist.Work]:
        """Post the message of that number, in one launch: the states of several teachers are one message."""
        group = self.groups[number % len(self.groups)]
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, state, group=group, group_peer=peer) for state in states]
        )

    def wait_for_sends(self, most: int = 0) -> None:
        """Let the device wait until the next rank has received all states but the latest `most`.

        gloo's sends do not say that they have ended before they are waited for.
        """
        done = max(len(self._sending) - most, 0)
        for requests, _ in self._sending[:done]:
            for request in requests:
                request.wait()
        del self._sending[:done]
