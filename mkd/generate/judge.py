"""Rewards of completions, in a thread beside the sampler: a slow function does not stop the model."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mkd.errors import DataError
from mkd.generate.completions import Completion
from mkd.generate.teacher_prompts import TeacherPrompt
from mkd.kinds.sampled.reward.reward_calls import RewardCalls
from mkd.tokenizers.tokenizer import Tokenizer

WAITING = 1024  # completions that wait for the function before the sampler does

Job = tuple[TeacherPrompt, Completion]


@dataclass
class Judge:
    """Judges completions in the order in which they come, and hands each to `write`."""

    calls: RewardCalls | None  # None: they are written as they are
    tokenizer: Tokenizer
    write: Callable[[Completion], None]
    max_failed: int
    failed: int = 0
    _jobs: queue.Queue[Job | None] = field(default_factory=lambda: queue.Queue(WAITING))
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def add(self, prompt: TeacherPrompt, completion: Completion) -> None:
        """Take a completion. Raises what went wrong with an earlier one."""
        while True:
            self._raise()
            try:
                return self._jobs.put((prompt, completion), timeout=1.0)
            except queue.Full:
                continue

    def close(self) -> None:
        """Wait until all are written. Raises what went wrong with one."""
        self._jobs.put(None)
        self._thread.join()
        self._raise()

    def stop(self) -> None:
        """End the process of the function."""
        if self.calls is not None:
            self.calls.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is not None:
                continue  # so that nobody waits for room
            try:
                prompt, completion = job
                judged = self._judged(prompt, completion)
                self.write(judged)  # also without a reward: it is not sampled again
                if self.failed > self.max_failed:
                    raise self._too_many(prompt, judged)
            except BaseException as error:
                self._error = error

    def _judged(self, prompt: TeacherPrompt, completion: Completion) -> Completion:
        if self.calls is None:
            return completion
        fields: dict[str, Any] = json.loads(json.dumps(dict(prompt.fields), default=str))  # dates of tables
        try:
            reward = self.calls(self.tokenizer.decode(prompt.ids.tolist()), completion.text, fields)
        except DataError as error:
            self.failed += 1
            return replace(completion, failure=error.what)
        return replace(completion, reward=reward, failure=None)

    def _too_many(self, prompt: TeacherPrompt, completion: Completion) -> DataError:
        return DataError(
            f"{prompt.path}:{prompt.line}, sample {completion.sample}: {completion.failure}",
            f"{self.max_failed} completions may have no reward (--max-failed-rewards): they are dropped",
            "repair the function, or raise the limit; the same command resumes and judges them again",
            code="reward-failed",
        )
