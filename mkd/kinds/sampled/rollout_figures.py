"""Figures of the completions of a step, which show how sampling does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkd.kinds.sampled.sampler.rollouts import Rollout

LOG = logging.getLogger("mkd")
GRAM = 4  # tokens of a sequence that counts as repeated
TRUNCATED_LIMIT = 0.5
FLAT_STEPS = 10  # steps without any difference of rewards before a warning


def repetition(ids: np.ndarray) -> float:
    """Return the fraction of the sequences of 4 tokens that occurred before, 0 for a shorter completion."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def figures(rollouts: Sequence[Rollout], time_ms: float) -> dict[str, float]:
    """Return the metrics of all completions of a step, those that are dropped from training included."""
    tokens = sum(one.num_sampled for one in rollouts)
    return {
        "rollout/length": tokens / len(rollouts),
        "rollout/truncated": sum(one.is_truncated for one in rollouts) / len(rollouts),
        "rollout/repetition": sum(repetition(one.ids) for one in rollouts) / len(rollouts),
        "rollout/entropy": float(sum(one.entropy.sum(dtype=np.float64) for one in rollouts)) / tokens,
        "rollout/version_lag": sum(one.lag for one in rollouts) / len(rollouts),
        "rollout/time_ms": time_ms,
    }


def figures_by_tag(rollouts: Sequence[Rollout], tags: Sequence[str]) -> dict[str, float]:
    """Return the metrics of the completions of each tag; {} without tags."""
    found = {}
    for tag in sorted({tag for tag in tags if tag}):
        own = [one for one, its in zip(rollouts, tags, strict=True) if its == tag]
        found[f"rollout/length/{tag}"] = sum(one.num_sampled for one in own) / len(own)
        found[f"rollout/truncated/{tag}"] = sum(one.is_truncated for one in own) / len(own)
    return found


def warn_if_empty(iteration: int, sampled: int, judged: int, kept: int) -> None:
    """Warn of a step that trains on nothing.

    Of its `sampled` completions `judged` have a reward, if they need one; `kept` of these are in the loss.
    """
    if kept == 0:
        LOG.warning(
            "iteration %d: no completion is left for the loss: %d of %d have no reward, %d are cut off and "
            "dropped. The gradient is 0: only weight decay and the optimizer's momentum move weights",
            iteration,
            sampled - judged,
            sampled,
            judged,
        )


def warn_if_untaught(iteration: int) -> None:
    """Warn of a step in which no teacher is compared with the student's text."""
    LOG.warning(
        "iteration %d: no token of the completions is compared with a teacher, so teachers add nothing to "
        "the loss: contexts are missing or fill the teacher's packs, or skip_first is as long as completions",
        iteration,
    )


@dataclass
class FlatRewardWatch:
    """Warns when no prompt has completions of different rewards for many steps, once until one has."""

    steps: int = 0

    def judge(self, iteration: int, flat: float | None, mean: float | None) -> None:
        """Look at the fraction of prompts whose rewards are all the same; None for a step without rewards."""
        if flat is None or mean is None:
            return
        self.steps = self.steps + 1 if flat == 1 else 0
        if self.steps == FLAT_STEPS:
            LOG.warning(
                "iteration %d: for %d steps, all completions of each prompt have had the same reward (mean "
                "%.3g), so that rewards teach nothing. Check the reward function, take easier or harder "
                "prompts, or raise --samples-per-prompt or --rollout-temperature",
                iteration,
                FLAT_STEPS,
                mean,
            )


@dataclass
class TruncationWatch:
    """Warns when most completions are cut off, once until fewer are."""

    is_high: bool = False

    def judge(self, iteration: int, truncated: float, max_new_tokens: int) -> None:
        """Look at the truncated fraction of a step."""
        if truncated > TRUNCATED_LIMIT and not self.is_high:
            LOG.warning(
                "iteration %d: %.2f of the completions reach --max-new-tokens %d without a stop token; texts "
                "that grow without end are the usual failure of on-policy training. Start from a student "
                "that stops (off-policy steps first), lower --on-policy-fraction, or raise --max-new-tokens",
                iteration,
                truncated,
                max_new_tokens,
            )
        self.is_high = truncated > TRUNCATED_LIMIT
