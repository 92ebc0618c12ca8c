"""The settings of a chunk loss."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.models import XTOKEN_LOSSES
from mkd.errors import UsageError
from mkd.losses.divergence_base import Divergence
from mkd.losses.divergences import KLMixture
from mkd.losses.kd_objective import TEMPERATURE_SCALINGS, require_temperature


@dataclass(frozen=True)
class ChunkLossSettings:
    """A chunk's loss is `weight * s(temperature) * D(teacher's chunk, student's chunk)`.

    * `partition_kl`: divergence over {support, rest}. The support is the common tokens for a 1-1 chunk, and
      the chunk's listed pairs for others.
    * `prefix_kl`: divergence over common tokens at the start of every chunk. A token without a twin counts as
      the common token that it begins with. For chunks of several tokens partition_kl of the whole chunk is
      added.
    * `p_kl`: divergence over the teacher's vocabulary, the student's probabilities projected on it (X-Token,
      arXiv 2605.21699).
    * `gold` (hybrid ULD), `h_kl` (X-Token; the same on strict and relaxed pairs): divergence over
      {common tokens, rest} plus the L1 distance of the other tokens' sorted probabilities.
    * `uld` (arXiv 2402.12030): the L1 distance of all sorted probabilities; it reads no divergence.

    Raises UsageError for a value that makes no loss.
    """

    loss: str = "partition_kl"
    divergence: Divergence = KLMixture(forward=1.0, reverse=0.0)  # see `build_divergence`
    temperature: float = 1.0  # logits of both models are divided by it, those of realised tokens too
    temperature_scaling: str = "squared"  # s(T): "squared" or "none"
    top_k: int | None = None  # partition_kl: the teacher's likeliest common tokens of a 1-1 chunk, and ties

    def __post_init__(self) -> None:
        if self.loss not in XTOKEN_LOSSES:
            do = f"choose one of: {', '.join(XTOKEN_LOSSES)}"
            raise UsageError(
                f"xtoken loss is {self.loss!r}", "mkd has no such loss", do, code="value-unknown"
            )
        require_temperature("temperature", self.temperature, self.temperature_scaling)
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(
                f"xtoken top-k is {self.top_k}",
                "a support needs a token",
                "choose 1 or more, or leave it out for all",
                code="out-of-range",
            )

    @property
    def scale(self) -> float:
        """Factor s(T) of the divergence."""
        return TEMPERATURE_SCALINGS[self.temperature_scaling](self.temperature)

    def hybrid_weights(self, common_share: float) -> tuple[float, float]:
        """Return weights of divergence and sorted L1; `common_share` is common tokens / teacher's rows."""
        return (common_share, 1.0 - common_share) if self.loss == "gold" else (1.0, 1.0)
