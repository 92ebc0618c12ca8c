"""Rewards of a step's completions, and the advantages that follow from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mkd.data.prompts import PromptSet
from mkd.errors import DataError, MkdError
from mkd.kinds.sampled.reward.reward_calls import Judgement, RewardCalls
from mkd.kinds.sampled.sampler.rollouts import Rollout
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext
from mkd.tokenizers.tokenizer import Tokenizer

STD_OFFSET = 1e-6  # keeps the advantage of equal rewards 0
SLICE_S = 10.0  # after which all ranks meet, so that waiting for rank 0 counts as progress
SHOWN_CHARACTERS = 200  # of a completion whose reward failed


@dataclass
class Rewards:
    """Judges all completions of a step on rank 0, and passes their advantages to all ranks."""

    calls: RewardCalls
    prompts: PromptSet
    tokenizer: Tokenizer
    context: ParallelContext
    group_size: int  # completions of a prompt, one after the other
    max_failed: int  # in a step
    file: Path  # failed calls, one JSON line each
    announce: Callable[[int], None] = lambda iteration: None  # called before every slice
    slice_s: float = SLICE_S
    _failed: int = 0  # of this step

    def start(self) -> None:
        """Start the process of the function. Raises UsageError if there is none. Collective."""
        on_rank_0(self.calls.start, _unexpected)

    def __call__(self, rollouts: Sequence[Rollout], iteration: int) -> tuple[list[Rollout], dict[str, float]]:
        """Return the completions that have a reward, with their advantages, and metrics. Collective.

        Raises DataError on all ranks if more than `max_failed` have none.
        """
        said = self._judge(rollouts, iteration)
        rewards = np.array([one.reward for one in said], dtype=np.float64)
        groups = rewards.reshape(-1, self.group_size)
        advantages, is_flat = group_advantages(groups)
        is_judged = np.isfinite(rewards)
        judged = [
            replace(one, advantage=float(advantage), reward=its.reward, feedback=its.feedback)
            for one, advantage, its in zip(rollouts, advantages.reshape(-1), said, strict=True)
            if np.isfinite(its.reward)
        ]
        figures = {"reward/failed": float((~is_judged).sum())}
        if judged:
            figures["reward/mean"] = float(rewards[is_judged].mean())
            tags = np.array([self.prompts.prompts[one.request.prompt].tag for one in rollouts])
            for tag in sorted({*tags[is_judged].tolist()} - {""}):
                figures[f"reward/mean/{tag}"] = float(rewards[is_judged & (tags == tag)].mean())
            figures["reward/std0_groups"] = float(is_flat[np.isfinite(groups).any(axis=1)].mean())
        return judged, figures

    def _judge(self, rollouts: Sequence[Rollout], iteration: int) -> list[Judgement]:
        """Return what is said about each completion, NaN where that failed.

        Collective: ranks meet after a slice.
        """
        self._failed = 0
        said: list[Judgement] = []
        while len(said) < len(rollouts):
            self.announce(iteration)
            left = rollouts[len(said) :]
            found = on_rank_0(partial(self._judge_slice, left, iteration), _unexpected)
            said += self.context.broadcast_object(found or [])
        return said

    def _judge_slice(self, rollouts: Sequence[Rollout], iteration: int) -> list[Judgement]:
        """Judge the first completions, at least one, that take about `slice_s`."""
        end, said = time.monotonic() + self.slice_s, list[Judgement]()
        for one in rollouts:
            said.append(self._judge_one(one, iteration))
            if time.monotonic() >= end:
                break
        return said

    def _judge_one(self, rollout: Rollout, iteration: int) -> Judgement:
        prompt = self.prompts.prompts[rollout.request.prompt]
        completion = self.tokenizer.decode(rollout.text_ids.tolist())
        try:
            return self.calls.judge(self.tokenizer.decode(prompt.ids.tolist()), completion, prompt.fields)
        except DataError as failed:
            self._failed += 1
            entry = {"iteration": iteration, "file": prompt.path, "line": prompt.line, "reason": failed.what}
            entry |= {"sample": rollout.request.sample, "completion": completion[:SHOWN_CHARACTERS]}
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
            if self._failed > self.max_failed:
                place = f"{prompt.path}:{prompt.line}, iteration {iteration}"
                raise failed.located(place) from failed
            return Judgement(float("nan"))


def group_advantages(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages [groups, n], which groups have equal rewards, bool [groups]).

    `rewards` float64 [groups, n], NaN where one failed, which counts as absent. The advantage is (R - mean) /
    (std + 1e-6) with the standard deviation of a sample (divided by n - 1). Source: Shao et al. 2024 (arXiv
    2402.03300), section 4.1.2.
    """
    here = np.isfinite(rewards)
    count = here.sum(axis=1, keepdims=True)
    values = np.where(here, rewards, 0.0)
    centred = np.where(here, values - values.sum(axis=1, keepdims=True) / np.maximum(count, 1), 0.0)
    spread = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
    largest = np.where(here, values, -np.inf).max(axis=1)
    is_flat = largest <= np.where(here, values, np.inf).min(axis=1)
    centred[is_flat] = 0.0  # rounding of the mean
    return centred / (spread + STD_OFFSET), is_flat


def _unexpected(error: Exception) -> MkdError:
    what = f"rewards cannot be computed: {type(error).__name__}: {error}"
    return DataError(what, "", "check the fields of the prompts and the log folder", code="reward-failed")
