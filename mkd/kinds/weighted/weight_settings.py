"""The setting of records with weights."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option

LOSS_KEY = "weighted_ce_loss"  # metric of the loss


@dataclass(frozen=True)
class WeightConfig:
    """A cross entropy in which each record has a weight."""

    weight_key: str | None = option(
        None,
        "key of a number above 0 in every record, held-out ones included. Each of the record's loss tokens "
        "counts with this weight in the cross entropy, a mean over all weights. Divergences ignore it "
        "(default: all tokens count alike)",
    )
