"""Messages of a student's replica to a teacher's: a row of tokens, a credit for a state, the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.parallel.host_row import HostRow
from mkd.parallel.side_groups import Bridge, Transfer

STOP, ROW, CREDIT = 0, 1, 2
"""Kinds: the student ends; a row to run; the receive of a row's state is posted."""
HEAD = 6  # numbers of the fixed part of a message
STUDENT, TEACHER = 0, 1  # processes of a channel


@dataclass(frozen=True)
class Message:
    """A message. `number` is that of the request, or the exit code of STOP."""

    kind: int
    number: int
    row: Tensor | None = None  # ROW: tokens, borders, borders with padding, int64, one after the other
    tokens: int = 0  # ROW: tokens of the row
    max_seqlen: int = 0  # ROW
    student: int = 0  # replica that sent it, as the receiver knows it

    @classmethod
    def of_row(cls, number: int, row: HostRow) -> Message:
        """Return the request of a row."""
        parts = [torch.from_numpy(one) for one in (row.tokens, row.cu_seqlens, row.cu_seqlens_padded)]
        return cls(ROW, number, torch.cat([one.long() for one in parts]), len(row.tokens), row.max_seqlen)

    @classmethod
    def of_head(cls, head: Tensor, row: Tensor | None) -> Message:
        """Return the message with this head, and the row that it announces."""
        kind, number, _, tokens, max_seqlen, student = head.tolist()
        return cls(kind, number, row, tokens, max_seqlen, student)

    @property
    def head(self) -> Tensor:
        """The fixed part, int64 [HEAD]; its third number is the length of `row`."""
        length = 0 if self.row is None else len(self.row)
        return torch.tensor([self.kind, self.number, length, self.tokens, self.max_seqlen, self.student])

    def send(self, channel: Bridge) -> list[Transfer]:
        """Send it to the teacher. The transfers must be kept until it has arrived."""
        parts = [self.head] if self.row is None else [self.head, self.row]
        return [channel.send(part, TEACHER) for part in parts]

    @classmethod
    def receive(cls, channel: Bridge, student: int) -> Message:
        """Wait for the next message of that replica of the student, and return it."""
        head = channel.receive(torch.zeros(HEAD, dtype=torch.int64), STUDENT).wait()
        head[-1] = student
        length = int(head[2])
        row = channel.receive(torch.zeros(length, dtype=torch.int64), STUDENT).wait() if length else None
        return cls.of_head(head, row)

    def host_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (tokens [t], borders, borders with padding) of a ROW."""
        assert self.row is not None, "a request has a row"
        borders = (len(self.row) - self.tokens) // 2
        tokens, lengths, padded = self.row.split([self.tokens, borders, borders])
        return tokens, lengths.int(), padded.int()
