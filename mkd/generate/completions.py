"""A completion as a journal has it."""

from __future__ import annotations

from dataclasses import dataclass

STOP, LENGTH, CONTEXT = "stop", "length", "context"


@dataclass(frozen=True)
class Completion:
    """One completion."""

    prompt: int  # number of the prompt
    sample: int  # number of the completion among those of the prompt
    text: str  # without the token that ends it
    end: str  # STOP, LENGTH (--max-new-tokens) or CONTEXT (the teacher's context is full)
    tokens: int  # with the one that ends it
    logp: float  # ln p of all of them at temperature 1, nats
    control: int = 0  # control tokens in the text
    is_utf8: bool = True  # False: the text has U+FFFD where the tokens have other bytes
    reward: float | None = None  # None: not judged, or the function failed
    failure: str | None = None  # why the function failed

    @property
    def place(self) -> tuple[int, int]:
        """Prompt and sample."""
        return self.prompt, self.sample

    @property
    def is_truncated(self) -> bool:
        """True if the teacher has not ended it."""
        return self.end != STOP
