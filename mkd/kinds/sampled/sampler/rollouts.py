"""A prompt to complete, its sampled completion, and the settings of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

STOP, LENGTH = "stop", "length"
"""Reasons why a completion ends: it has a stop token, or it was cut off at its longest length."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt: int  # number of the prompt in its data set
    sample: int  # number of the completion among those of the prompt
    ids: np.ndarray  # [p] int64, tokens of the prompt, at least one


@dataclass(frozen=True)
class Rollout:
    """One sampled completion. The last token is a stop token if `finish` is STOP.

    In one of several turns, results of tools stand between the sampled parts, which alone have `loss`.
    """

    request: Request
    ids: np.ndarray  # [c] int64, sampled tokens, at least one
    logp: np.ndarray  # [c] float32, ln p of each token at T = 1, as the sampler computed it, nats
    entropy: np.ndarray  # [c] float32, of the distribution at each token at T = 1, nats; a server's: -logp
    finish: str  # STOP or LENGTH
    lag: int = 0  # updates of the student since the weights that sampled it
    advantage: float | np.ndarray = 0.0  # of its reward over those of the same prompt, or of each token [c]
    loss: np.ndarray | None = None  # [c] bool, which tokens were sampled; None: all. The others: logp 0
    # Teacher with a context -> tokens [p] of its prompt, where these are not known before it is sampled.
    of_teachers: Mapping[str, np.ndarray] = field(default_factory=dict)
    reward: float | None = None  # None: nothing judges it
    feedback: str = ""  # of its reward function

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the student sampled."""
        return len(self.ids) if self.loss is None else int(self.loss.sum())

    @property
    def text_ids(self) -> np.ndarray:
        """Its tokens without the one at which it stopped."""
        return self.ids[:-1] if self.finish == STOP else self.ids

    @property
    def is_truncated(self) -> bool:
        return self.finish == LENGTH


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    vocab_size: int  # ids from here on are never sampled: some model of the run lacks them
    temperature: float = 1.0  # 0: the most probable token, always
    slots: int = 32  # completions that are sampled at the same time on a data-parallel replica
    prefill_tokens: int = 8192  # prompt tokens that run through the model together, unless one is longer
    seed: int = 0
    unused_ids: frozenset[int] = frozenset()  # below vocab_size: no tokens, so never sampled either
    top_p: float = 1.0  # sample among the fewest most probable ids that have this probability together
    context_length: int | None = None  # most tokens of a prompt with its completion; None: no limit

    def after(self, prompt_tokens: int) -> Sampling:
        """Return the settings after a prompt of so many tokens, which leaves less room in the context."""
        if self.context_length is None:
            return self
        room = self.context_length - prompt_tokens
        return replace(self, max_new_tokens=min(self.max_new_tokens, room))

    def is_sampled(self, token: int) -> bool:
        """Return True if a completion may have this id."""
        return 0 <= token < self.vocab_size and token not in self.unused_ids


class RolloutSource(Protocol):
    """Where completions come from."""

    @property
    def sampling(self) -> Sampling:
        """Settings of sampling."""

    def sample(
        self,
        requests: Sequence[Request],
        iteration: int,
        progress: Callable[[int], None],  # called now and then, with the number of finished completions
        following: Sequence[Request] = (),  # of the next step, for a source that samples ahead
    ) -> list[Rollout]:
        """Return all completions, equal on all ranks. Collective."""
