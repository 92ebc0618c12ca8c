"""The settings of training on judged answers: preference pairs."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option


@dataclass(frozen=True)
class FeedbackConfig:
    """Losses of judged answers, which take the place of the cross entropy."""

    dpo_beta: float | None = option(
        None,
        "factor on the log-ratios of DPO, 0.1 as a rule. It turns DPO on: --data-path has records with "
        "prompt, chosen and rejected. A smaller one lets the student move further from the reference, "
        "which is --teacher-hf or the initial student. Needs --kd-ratio 0 (default: no DPO)",
    )

    @property
    def is_on(self) -> bool:
        """True if the run learns from judged answers."""
        return self.has_pairs

    @property
    def has_pairs(self) -> bool:
        """True if the run learns from preference pairs."""
        return self.dpo_beta is not None
