"""The LM head of a teacher whose hidden states are stored: all that is left of it in a stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mkd.plan.models.model_shape import ModelShape


@dataclass(frozen=True)
class StoredHead:
    """This rank's rows of a frozen head, as the loss reads those of a `LanguageModel`."""

    shape: ModelShape
    weight: Tensor  # [v/tp, h], padded as the student's

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the LM head, [v/tp, h]."""
        return self.weight
