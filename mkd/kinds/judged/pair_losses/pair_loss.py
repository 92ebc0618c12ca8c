"""The interface of a loss of preference pairs: settings, and a margin between two answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Values = Any
"""A tensor of one number per pair, fp64 [pairs]. This module has to load without torch."""


@dataclass(frozen=True)
class Answers:
    """The chosen answers, or the rejected ones, of all pairs of a micro-batch."""

    logp: Values  # sum of ln p under the student over the tokens of the answer, its end included; has a graph
    reference_logp: Values  # the same under the reference, without a graph; 0 if the loss has no reference
    length: Values  # number of these tokens


class PairLoss:
    """A loss of preference pairs. A subclass is a dataclass with its settings.

    The loss is the mean of `value` over the pairs of a global batch. Its gradient follows from the formula.
    """

    title: ClassVar[str]  # in the loss card, such as DPO
    prefix: ClassVar[str]  # of its settings and metrics: dpo_beta, dpo/margin
    needs_reference: ClassVar[bool]
    part_help: ClassVar[Mapping[str, str]] = {}  # name of a part of the loss -> text of its metric, a mean

    @property
    def beta(self) -> float | None:
        """Factor of the margin, which turns the loss on; None: it is off."""
        beta: float | None = getattr(self, f"{self.prefix}_beta")
        return beta

    @property
    def flag(self) -> str:
        """Flag that turns the loss on."""
        return f"--{self.prefix}-beta"

    def margin(self, chosen: Answers, rejected: Answers) -> Values:
        """Return by how much the student prefers the chosen answers, fp64 [pairs]."""
        raise NotImplementedError

    def value(self, margin: Values, chosen: Answers, rejected: Answers) -> Values:
        """Return the loss of each pair, nats, fp64 [pairs]; by default -ln sigmoid(margin)."""
        return (-margin).logaddexp(margin.new_zeros(()))

    def parts(self, chosen: Answers, rejected: Answers) -> Mapping[str, Values]:
        """Return the parts named in `part_help`, nats, fp64 [pairs]. They are metrics only."""
        return {}

    def formula(self) -> str:
        """Return the loss of a pair as text, with its numbers, for the loss card.

        The card explains s_c, s_r (sums of ln p under the student), r_c, r_r (under the reference), and n_c,
        n_r (tokens) of the chosen and the rejected answer.
        """
        raise NotImplementedError

    def in_trl(self) -> str | None:
        """Return the settings of the same loss in TRL, after which the loss card adds a condition.

        None: TRL has no equal loss.
        """
        return None

    @classmethod
    def margin_help(cls) -> str:
        """Return the text of its metric `margin`."""
        raise NotImplementedError
