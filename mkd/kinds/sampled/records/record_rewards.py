"""Advantages of records, from the rewards of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from mkd.kinds.sampled.records.agent_record import RecordedRollout
from mkd.kinds.sampled.reward.rewards import group_advantages


class RecordRewards:
    """Turns the rewards in records into advantages. An advantage in a record stays."""

    def __call__(
        self, rollouts: Sequence[RecordedRollout], iteration: int
    ) -> tuple[list[RecordedRollout], dict[str, float]]:
        """Return the rollouts with their advantages, and metrics. Records of a group follow each other."""
        groups = [list(records) for _, records in groupby(rollouts, key=lambda one: one.group)]
        rewards = np.full((len(groups), max(map(len, groups))), np.nan)
        for row, records in zip(rewards, groups, strict=True):
            row[: len(records)] = [np.nan if one.reward is None else one.reward for one in records]
        advantages, is_flat = group_advantages(rewards)
        judged = [
            one if one.has_advantage else replace(one, advantage=float(advantage))
            for records, row in zip(groups, advantages, strict=True)
            for one, advantage in zip(records, row, strict=False)
        ]
        figures = {}
        has_reward = np.isfinite(rewards)
        if has_reward.any():
            figures["reward/mean"] = float(rewards[has_reward].mean())
            figures["reward/std0_groups"] = float(is_flat[has_reward.any(axis=1)].mean())
        return judged, figures
