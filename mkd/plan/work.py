"""The additions of the kinds of a run (mkd/kinds) to the times and the memory of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class StudentProducts(Protocol):
    """Products of the student's layers in another precision than the run's."""

    @property
    def weight_bytes(self) -> float:
        """Bytes for each weight that a micro-batch keeps from forward to backward, beside the parameter."""

    @property
    def input_bytes(self) -> float:
        """Bytes of each channel of an input that it keeps."""

    def product_time(self, hidden_size: int) -> float:
        """Return the time of a product over the time in the run's precision."""


@dataclass(frozen=True)
class Work:
    """Changes to a step of cross entropy and divergences."""

    own_head_pass: bool = False  # the loss on the data cannot share a pass over the head with a divergence
    one_head_pass: bool = False  # divergences share a pass, because each has rows of its own
    scores_tokens: bool = False  # one more pass over the student's head, without gradients
    scores_for_metrics: bool = False  # such a pass that takes memory, but is not timed
    updates: int = 1  # of each iteration
    slots: int = 0  # sequences that the student samples at the same time on a process, at most
    completions: Callable[[int], int] | None = None
    """Packs of a global batch -> sequences that all processes sample in a step; None: no limit is known."""
    student: StudentProducts | None = None  # None: they have the precision of the run
    lines: tuple[Callable[[int], str], ...] = ()  # packs of a global batch -> line of the plan

    def __add__(self, other: Work) -> Work:
        return Work(
            own_head_pass=self.own_head_pass or other.own_head_pass,
            one_head_pass=self.one_head_pass or other.one_head_pass,
            scores_tokens=self.scores_tokens or other.scores_tokens,
            scores_for_metrics=self.scores_for_metrics or other.scores_for_metrics,
            updates=max(self.updates, other.updates),
            slots=self.slots + other.slots,
            completions=self.completions or other.completions,
            student=self.student or other.student,
            lines=self.lines + other.lines,
        )
