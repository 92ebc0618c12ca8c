"""Settings of completions, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.errors import MkdError, UsageError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Generation:
    """Settings of completions, of both models."""

    max_new_tokens: int
    temperature: float  # 0: the most probable token, always
    top_p: float  # sample among the fewest most probable tokens that have this probability together
    seed: int
    samples: int = 1  # completions of a prompt
    slots: int = 32  # completions that are sampled at the same time

    def problems(self) -> list[MkdError]:
        """Return an error for every setting that cannot work."""
        found: list[MkdError] = []
        if not 0 <= self.temperature < float("inf"):
            found.append(_range("--temperature", self.temperature, "a finite number of 0 or more"))
        if not 0 < self.top_p <= 1:
            found.append(_range("--top-p", self.top_p, "a number above 0, and at most 1"))
        if not 0 <= self.seed <= MAX_SEED:
            found.append(_range("--seed", self.seed, f"a whole number from 0 to {MAX_SEED}"))
        if self.temperature == 0 and self.samples > 1:
            found.append(
                UsageError(
                    f"--samples-per-prompt {self.samples} at --temperature 0",
                    "the most probable token is always the same, and so are all samples of a prompt",
                    "raise --temperature, or leave out --samples-per-prompt",
                    code="exclude-each-other",
                )
            )
        return found


def _range(flag: str, value: float, allowed: str) -> UsageError:
    return UsageError(f"{flag} is {value}", "", f"give {allowed}", code="out-of-range")
