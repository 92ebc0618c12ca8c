"""The settings of rewards of sampled answers."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import ABOVE_0, NOT_NEGATIVE, Range, option

RECORDED = "records"
"""Value of --reward: the records of agents hold their rewards."""


@dataclass(frozen=True)
class RewardConfig:
    """Rewards of the student's completions, and the loss that learns from them (GRPO)."""

    reward: str | None = option(
        None,
        "function that judges completions, module:function, called as function(prompt, completion, fields); "
        "it turns GRPO on. The loss is then (1 - kd_ratio) x policy loss + kd_ratio x divergence. Needs "
        "--on-policy-fraction 1 and --samples-per-prompt of 2 or more. `records`: the rewards in the records "
        "of --rollout-source records (default: no rewards)",
    )
    reward_timeout_s: float = option(
        10.0,
        "seconds that the reward function may take for a completion; after that its process restarts",
        valid=ABOVE_0,
    )
    max_failed_rewards: int = option(
        0,
        "completions of a step whose reward may fail: it raises, takes too long or is not a finite number. "
        "These are left out and listed in failed_rewards.jsonl. One more ends the run",
        valid=NOT_NEGATIVE,
    )
    clip_range: float = option(
        0.2,
        "largest change of a token's probability ratio that gains reward, in both directions. It matters "
        "only with --rollout-updates above 1",
        valid=Range("above 0 and below 1", lambda x: 0 < x < 1),
    )
    rollout_updates: int = option(
        1,
        "updates that each iteration makes with the same completions. Above 1 the loss has the clipped ratio "
        "of the present probabilities to the sampler's",
        valid=Range("1 or more", lambda x: x >= 1),
    )

    @property
    def is_on(self) -> bool:
        """True if the student's completions have rewards."""
        return self.reward is not None

    @property
    def has_ratio(self) -> bool:
        """True if the loss has the ratio to the sampler's probabilities."""
        return self.rollout_updates > 1 or self.reward == RECORDED
