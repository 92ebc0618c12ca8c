"""Which process of a replica holds which rows of a state, and what two replicas of other layouts exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.parallel.zigzag import RowShard
from mkd.plan.parallel_sizes import Sizes


@dataclass(frozen=True)
class HeldRows:
    """The rows of a whole row of tokens on one process of a stage: the shard of the sequence, cut once more.

    Tensor-parallel processes hold equal parts in their order, also those that hold all of them: together they
    send a state once.
    """

    sizes: Sizes
    row_rank: int  # number among the processes that share a row: tensor-parallel rank first

    def of(self, cu_seqlens_padded: Tensor) -> Tensor:
        """Return the rows, int64 [t / row] on the CPU, in the order in which the process holds them."""
        shard, part = divmod(self.row_rank, self.sizes.tensor)
        rows = RowShard(shard, self.sizes.row // self.sizes.tensor).rows(cu_seqlens_padded)
        return rows.chunk(self.sizes.tensor)[part]


def common_rows(sender: Tensor, receiver: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the places of the rows that both hold: in the sender's state, and in the receiver's.

    They are in the receiver's order.
    """
    place = torch.full((num_tokens,), -1)
    place[sender] = torch.arange(len(sender))
    found = place[receiver]
    return found[found >= 0], (found >= 0).nonzero().flatten()


def messages(
    cu_seqlens_padded: Tensor, own: HeldRows, others: Sizes, is_sender: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the process on the other side, places in this process's state) of each message."""
    held, num_tokens = own.of(cu_seqlens_padded), int(cu_seqlens_padded[-1])
    for number in range(others.row):
        rows = HeldRows(others, number).of(cu_seqlens_padded)
        pair = (held, rows) if is_sender else (rows, held)
        places = common_rows(*pair, num_tokens)[0 if is_sender else 1]
        if len(places):
            yield number, places


def is_whole(places: Tensor, length: int) -> bool:
    """Return True if `places` are all of a state of `length` rows, in order."""
    return len(places) == length and torch.equal(places, torch.arange(length))


@dataclass(frozen=True)
class Routes:
    """Which replica of the teacher has which request of which replica of the student."""

    student: int  # replicas
    teacher: int

    def of(self, student: int, number: int) -> int:
        """Return the teacher's replica for request `number` of a student's."""
        return (number * self.student + student) % self.teacher

    def teachers_of(self, student: int) -> list[int]:
        """Return the replicas of the teacher that a replica of the student asks."""
        return sorted({self.of(student, number) for number in range(self.teacher)})

    def students_of(self, teacher: int) -> list[int]:
        """Return the replicas of the student that ask a replica of the teacher."""
        return [one for one in range(self.student) if teacher in self.teachers_of(one)]
