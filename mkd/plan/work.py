"""The additions of features to the times and the memory of a step.

Plans read `Work`, not the settings of features. `work_of` is the only place that knows these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mkd.config.schema import Config
from mkd.plan.rollout_plan import describe_rollouts


@dataclass(frozen=True)
class Work:
    """Changes to a step of cross entropy and divergences."""

    own_head_pass: bool = False  # the loss on the data cannot share a pass over the head with a divergence
    scores_tokens: bool = False  # one more pass over the student's head, without gradients
    scores_for_metrics: bool = False  # such a pass that takes memory, but is not timed
    updates: int = 1  # of each iteration
    slots: int = 0  # sequences that the student samples at the same time
    lines: tuple[Callable[[int], str], ...] = ()  # packs of a global batch -> line of the plan

    def __add__(self, other: Work) -> Work:
        return Work(
            own_head_pass=self.own_head_pass or other.own_head_pass,
            scores_tokens=self.scores_tokens or other.scores_tokens,
            scores_for_metrics=self.scores_for_metrics or other.scores_for_metrics,
            updates=max(self.updates, other.updates),
            slots=self.slots + other.slots,
            lines=self.lines + other.lines,
        )


def no_work(config: Config) -> Work:
    """Return the work of a run without features."""
    return Work()


def work_of(config: Config) -> Work:
    """Return what all features of a run add."""
    return judged_work(config) + rollout_work(config)


def judged_work(config: Config) -> Work:
    """Return what losses of judged answers add."""
    judged = config.feedback
    return Work(
        own_head_pass=judged.has_rewards, scores_tokens=judged.scores_tokens, updates=judged.rollout_updates
    )


def rollout_work(config: Config) -> Work:
    """Return what completions of the student add. Sampling is not timed."""
    rollout = config.rollout
    if not rollout.is_on:
        return Work()
    slots = rollout.rollout_slots if rollout.samples_here else 0
    return Work(scores_for_metrics=True, slots=slots, lines=(partial(describe_rollouts, config),))
