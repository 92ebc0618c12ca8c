"""An answer that a model is writing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from mkd.chat.generation import Generation
from mkd.chat.text_stream import TextStream
from mkd.chat.writer import Writer
from mkd.kinds.sampled.sampler.decoding import SampledRow
from mkd.kinds.sampled.sampler.rollouts import STOP, Request

INTERRUPTED, CONTEXT = "interrupted", "context"


class Answer:
    """Text that grows token by token, until the model ends it, it is cut off, or somebody interrupts it."""

    def __init__(self, writer: Writer, request: Request, generation: Generation):
        self.writer, self.prompt = writer, request.ids
        self.text, self.num_tokens = "", 0
        self.end: str | None = None  # stop, length, context or interrupted; None: it grows
        self._text = TextStream(writer.tokenizer, request.ids.tolist())
        self._rows: Iterator[SampledRow] = writer.stream([request], generation)
        self.seconds = 0.0  # that the model has computed

    def advance(self) -> str:
        """Run the model up to its next token, and return the text that is new. Collective."""
        piece, begin = "", time.perf_counter()
        row = next(self._rows, None)
        if row is not None:
            for _, token in row.tokens:
                self.num_tokens += 1
                piece += "" if token in self.writer.stops else self._text.push(token)
            if row.done:
                (rollout,) = row.done.values()
                piece += self._finish(end_of(self.writer, rollout.finish, self.prompt, rollout.ids))
        self.text += piece
        self.seconds += time.perf_counter() - begin
        return piece

    def interrupt(self) -> str:
        """End the answer here, and return the rest of its text."""
        rest = "" if self.end else self._finish(INTERRUPTED)
        self.text += rest
        return rest

    def _finish(self, end: str) -> str:
        self.end = end
        close = getattr(self._rows, "close", None)
        if close is not None:  # the model gets its own layers back
            close()
        return self._text.end()

    def note(self) -> str:
        """Return why the answer ends where it does; "" if the model has ended it."""
        return {
            "length": f"cut off after {self.num_tokens} tokens (--max-new-tokens)",
            CONTEXT: f"the context of {self.writer.context_length} tokens is full: /new starts again",
            INTERRUPTED: "interrupted",
        }.get(self.end or "", "")


def end_of(writer: Writer, finish: str, prompt: np.ndarray, ids: np.ndarray) -> str:
    """Return why a completion ended: `stop`, `length`, or `context` if the context is full."""
    is_full = finish != STOP and len(prompt) + len(ids) >= writer.context_length
    return CONTEXT if is_full else finish
