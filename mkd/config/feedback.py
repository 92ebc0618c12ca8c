"""The settings of training on judged answers: preference pairs, and rewards of sampled answers."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option


@dataclass(frozen=True)
class FeedbackConfig:
    """Losses of judged answers, which replace the cross entropy."""

    dpo_beta: float | None = option(
        None,
        "factor on the log-ratios of DPO, usually 0.1; it turns DPO on. --data-path then has records with "
        "prompt, chosen and rejected. A smaller factor lets the student move further from the reference, "
        "which is --teacher-hf or the initial student. Needs --kd-ratio 0 (default: no DPO)",
    )
    reward: str | None = option(
        None,
        "function that judges completions, module:function, called as function(prompt, completion, fields); "
        "it turns GRPO on. The loss is then (1 - kd_ratio) x policy loss + kd_ratio x divergence. Needs "
        "--on-policy-fraction 1 and --samples-per-prompt of 2 or more (default: no rewards)",
    )
    reward_timeout_s: float = option(
        10.0, "seconds that the reward function may take for a completion; after that its process restarts"
    )
    max_failed_rewards: int = option(
        0,
        "completions of a step whose reward may fail: it raises, takes too long or is no finite number. "
        "These are left out and listed in failed_rewards.jsonl. One more ends the run",
    )
    clip_range: float = option(
        0.2,
        "largest change of a token's probability ratio that gains reward, in both directions. It matters "
        "only with --rollout-updates above 1",
    )
    rollout_updates: int = option(
        1,
        "updates that each iteration makes with the same completions. Above 1 the loss has the clipped ratio "
        "of the present probabilities to the sampler's",
    )

    @property
    def is_on(self) -> bool:
        """True if the run learns from judged answers."""
        return self.has_pairs or self.has_rewards

    @property
    def has_pairs(self) -> bool:
        """True if the run learns from preference pairs."""
        return self.dpo_beta is not None

    @property
    def has_rewards(self) -> bool:
        """True if a function judges the student's completions."""
        return self.reward is not None

    @property
    def scores_tokens(self) -> bool:
        """True if the coefficients of the loss need a pass over the student's head before."""
        return self.has_pairs or (self.has_rewards and self.rollout_updates > 1)
