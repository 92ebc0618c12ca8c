"""What a chunk loss computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mkd.config.models import XTOKEN_LOSSES
from mkd.errors import UsageError
from mkd.losses.kd_objective import TEMPERATURE_SCALINGS

DIVERGENCES = ("forward_kl", "reverse_kl", "mixed_kl", "jsd")
CHAIN_BASES = ("last", "first")


@dataclass(frozen=True)
class ChunkLossSettings:
    """A chunk's loss is `weight * s(temperature) * D(teacher's chunk, student's chunk)`.

    * `partition_kl`: divergence over {support, rest}; the support is the common tokens for a 1-1 chunk, and the chunk's listed
      pairs for others.
    * `prefix_kl`: divergence over common tokens, a token without a twin counts as the common token that it begins with; at the
      start of every chunk, and for chunks of several tokens partition_kl's of the whole chunk is added.
    * `p_kl`: divergence over the teacher's vocabulary, the student's probabilities projected on it (X-Token, arXiv 2605.21699).
    * `gold` (hybrid ULD), `h_kl` (X-Token; the same on strict and relaxed pairs): divergence over {common tokens, rest} plus
      the L1 distance of the other tokens' sorted probabilities.
    * `uld` (arXiv 2402.12030): the L1 distance of all sorted probabilities; it reads no divergence.

    Raises UsageError for a value that makes no loss.
    """

    loss: str = "partition_kl"
    divergence: str = "forward_kl"
    jsd_beta: float = (
        0.5  # weight of the teacher in the mixture of `jsd`; 0 and 1 mean forward and reverse KL
    )
    mixed_kl_weight: float = 0.5  # weight of the forward KL in `mixed_kl`; the reverse KL has the rest
    temperature: float = 1.0  # logits of both models are divided by it, those of realised tokens too
    temperature_scaling: str = "squared"  # s(T): "squared" or "none"
    top_k: int | None = (
        None  # partition_kl: support of a 1-1 chunk, the teacher's k likeliest common tokens (ties included)
    )
    exact_token_match_only: bool = False  # only 1-1 chunks whose two tokens are a common pair count
    chain_base: str = "last"  # gold, h_kl, uld: the token of a chunk whose distribution stands for it, times p of its others
    common_weight: float | None = (
        None  # gold, h_kl: weight of the divergence; None: gold k / v_t (k common of v_t), h_kl 1
    )
    uncommon_weight: float | None = None  # of the sorted L1; None: gold 1 - k / v_t, h_kl 1

    def __post_init__(self) -> None:
        _require_known("xtoken loss", self.loss, XTOKEN_LOSSES)
        _require_known("divergence", self.divergence, DIVERGENCES)
        _require_known("temperature-scaling", self.temperature_scaling, tuple(TEMPERATURE_SCALINGS))
        _require_known("chain-base", self.chain_base, CHAIN_BASES)
        if not (math.isfinite(self.temperature) and self.temperature > 0.0):
            _refuse(
                f"temperature is {self.temperature}",
                "the logits are divided by it",
                "choose a finite value above 0",
                code="xtoken-temperature-out-of-range",
            )
        for name, weight in (("jsd-beta", self.jsd_beta), ("mixed-kl-weight", self.mixed_kl_weight)):
            if not 0.0 <= weight <= 1.0:
                _refuse(
                    f"{name} is {weight}",
                    "it is a weight between two distributions",
                    "choose a value from 0 to 1",
                    code="divergence-weight-out-of-range",
                )
        if self.top_k is not None and self.top_k < 1:
            _refuse(
                f"xtoken top-k is {self.top_k}",
                "a support needs a token",
                "choose 1 or more, or leave it out for all",
                code="xtoken-top-k-below-one",
            )
        for name, weight in (
            ("common-weight", self.common_weight),
            ("uncommon-weight", self.uncommon_weight),
        ):
            if weight is not None and not (math.isfinite(weight) and weight >= 0.0):
                _refuse(
                    f"xtoken {name} is {weight}",
                    "it weighs a part of the loss",
                    "choose a finite value from 0 up",
                    code="xtoken-weight-negative",
                )

    @property
    def scale(self) -> float:
        """s(T)."""
        return TEMPERATURE_SCALINGS[self.temperature_scaling](self.temperature)

    @property
    def base(self) -> str:
        """The token of a chunk whose whole distribution is read; supports are of last tokens."""
        return "last" if self.loss in ("partition_kl", "prefix_kl") else self.chain_base

    def hybrid_weights(self, common_share: float) -> tuple[float, float]:
        """Weights of divergence and sorted L1; `common_share`: common tokens / the teacher's rows."""
        defaults = (common_share, 1.0 - common_share) if self.loss == "gold" else (1.0, 1.0)
        given = self.common_weight, self.uncommon_weight
        common, uncommon = (
            default if one is None else one for one, default in zip(given, defaults, strict=True)
        )
        return common, uncommon


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        _refuse(
            f"{name} is {value!r}",
            "mkd has no such rule",
            f"choose one of: {', '.join(known)}",
            code="kd-rule-unknown",
        )


def _refuse(what: str, why: str, do: str, *, code: str) -> None:
    raise UsageError(what, why, do, code=code)
