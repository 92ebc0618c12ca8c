"""Calls of a reward function in a process of its own, which may be slow, hang or die."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mkd.errors import DataError, UsageError
from mkd.kinds.sampled.reward import reward_process

LARGEST = 1e100  # whose square is a number too
START_S = 120.0  # until the module of the function is imported
WHY = "--max-failed-rewards completions of a step may have no reward: they are left out of the loss"


class Judgement(NamedTuple):
    """Reward and feedback of one completion."""

    reward: float  # NaN: it failed
    feedback: str = ""


@dataclass
class RewardCalls:
    """The reward function `module:function`. Its process starts again if it has ended."""

    name: str
    timeout_s: float
    _process: subprocess.Popen[bytes] | None = None
    _rest: bytes = b""  # read after the last line

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> float:
        """Return the reward. Raises as `judge`."""
        return self.judge(prompt, completion, fields).reward

    def judge(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> Judgement:
        """Return what the function says.

        Raises DataError if the call gives no reward, UsageError if there is no function.
        """
        call, do = json.dumps([prompt, completion, fields]), "repair the function, or raise the limit"
        if self._process is None:
            self.start()
        try:
            answer = self._ask(call, self.timeout_s)
        except TimeoutError as error:
            what, longer = f"--reward took more than {self.timeout_s:g} s", f"raise --reward-timeout-s; {do}"
            raise DataError(what, WHY, longer, code="reward-timed-out") from error
        except (OSError, EOFError) as error:
            raise DataError("the process of --reward ended", WHY, do, code="reward-failed") from error
        if "error" in answer:
            raise DataError(f"--reward raised {answer['error']}", WHY, do, code="reward-failed")
        if not abs(answer["value"]) <= LARGEST:  # NaN is not
            what = f"--reward returned {answer['value']}, and a reward is a number from -1e100 to 1e100"
            raise DataError(what, WHY, do, code="reward-failed")
        return Judgement(answer["value"], answer.get("feedback", ""))

    def start(self) -> None:
        """Start the process. Raises UsageError if the function cannot be imported."""
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(reward_process.__file__).resolve()), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the run are not for it; it ends with its stdin
        )
        try:
            problem = self._ask(None, START_S).get("error")
        except (TimeoutError, OSError, EOFError) as error:
            problem = f"its import ended or took {START_S:g} s ({type(error).__name__})"
        if problem:
            self.close()
            what = f"--reward {self.name} cannot be called: {problem}"
            why = "it judges the completions of the student"
            do = "give module:function of a module in this folder or on PYTHONPATH"
            raise UsageError(what, why, do, code="reward-not-found")

    def close(self) -> None:
        """End the process and those that it started, if there is one."""
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group, because it has a session
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

    def _ask(self, line: str | None, timeout_s: float) -> dict[str, Any]:
        """Send a line and return the answer. Ends the process on TimeoutError, OSError and EOFError."""
        assert self._process is not None and self._process.stdin is not None
        try:
            if line is not None:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            return json.loads(self._read_line(time.monotonic() + timeout_s))
        except (TimeoutError, OSError, EOFError):
            self.close()
            raise

    def _read_line(self, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
            part = os.read(pipe, 1 << 16)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line
