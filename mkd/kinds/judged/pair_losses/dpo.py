"""Direct preference optimisation: raise the chosen answer over the rejected one, relative to a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkd.config.field import ABOVE_0, option
from mkd.kinds.judged.pair_losses.pair_loss import Answers, PairLoss, Values


@dataclass(frozen=True)
class DPO(PairLoss):
    """The loss -ln sigmoid(margin); margin = beta (chosen log-ratio - rejected log-ratio).

    The log-ratio of an answer is the sum of ln p - ln r over its tokens, p under the student and r under the
    reference. Source: Rafailov et al. 2023 (arXiv 2305.18290), section 4.
    """

    title: ClassVar[str] = "DPO"
    prefix: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True

    dpo_beta: float | None = option(
        None,
        "factor on the log-ratios of DPO, usually 0.1; it turns DPO on. --data-path then has records with "
        "prompt, chosen and rejected. A smaller factor lets the student move further from the reference, "
        "which is --teacher-hf or the initial student. Needs --kd-ratio 0 (default: no DPO)",
        valid=ABOVE_0,
    )

    def margin(self, chosen: Answers, rejected: Answers) -> Values:
        log_ratios = [one.logp - one.reference_logp for one in (chosen, rejected)]
        return self.beta * (log_ratios[0] - log_ratios[1])

    def formula(self) -> str:
        return f"-ln sigmoid(z), z = {self.beta:g} ((s_c - r_c) - (s_r - r_r))"

    def in_trl(self) -> str:
        return f"DPOConfig(beta={self.beta:g})"

    @classmethod
    def margin_help(cls) -> str:
        return (
            "mean over pairs of z = beta x (log-ratio of the chosen - log-ratio of the rejected answer), "
            "each of student to reference"
        )
