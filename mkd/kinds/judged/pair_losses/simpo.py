"""SimPO: raise the mean log-probability of the chosen answer over that of the rejected one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkd.config.field import ABOVE_0, NOT_NEGATIVE, option
from mkd.kinds.judged.pair_losses.pair_loss import Answers, PairLoss, Values


@dataclass(frozen=True)
class SimPO(PairLoss):
    """The loss -ln sigmoid(margin - gamma); margin = beta (chosen mean - rejected mean).

    The mean of an answer is that of ln p over its tokens under the student: no reference runs. Source: Meng
    et al. 2024 (arXiv 2405.14734), section 2.
    """

    title: ClassVar[str] = "SimPO"
    prefix: ClassVar[str] = "simpo"
    needs_reference: ClassVar[bool] = False

    simpo_beta: float | None = option(
        None,
        "factor on the mean log-probabilities of SimPO, usually 2 to 10; it turns SimPO on, which learns "
        "from the records of DPO without a reference. Needs --kd-ratio 0 (default: no SimPO)",
        valid=ABOVE_0,
    )
    simpo_gamma: float = option(
        1.0,
        "margin that SimPO wants between the chosen and the rejected answer, usually a quarter to three "
        "quarters of --simpo-beta",
        valid=NOT_NEGATIVE,
    )

    def margin(self, chosen: Answers, rejected: Answers) -> Values:
        means = [one.logp / one.length for one in (chosen, rejected)]
        return self.beta * (means[0] - means[1])

    def value(self, margin: Values, chosen: Answers, rejected: Answers) -> Values:
        return super().value(margin - self.simpo_gamma, chosen, rejected)

    def formula(self) -> str:
        return f"-ln sigmoid(z - {self.simpo_gamma:g}), z = {self.beta:g} (s_c / n_c - s_r / n_r)"

    def in_trl(self) -> str:
        settings = f"beta={self.beta:g}, simpo_gamma={self.simpo_gamma:g}, cpo_alpha=0"
        return f'CPOConfig(loss_type="simpo", {settings})'

    @classmethod
    def margin_help(cls) -> str:
        return (
            "mean over pairs of z = beta x (mean ln p of the chosen - of the rejected answer), without gamma"
        )
