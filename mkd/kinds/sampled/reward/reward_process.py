"""The process that calls a reward function: `python reward_process.py module:function`.

It imports nothing of mkd. For each call it reads a line of JSON, [prompt, completion, fields], from stdin
and writes one to stdout: {"value": number, "feedback": text} or {"error": text}. A line before the first call
says whether the function was found. What the function prints goes to stderr, and its own stdin is empty. The
process ends with the stdin that it was given, even in the middle of a call.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


def main() -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")  # programs that the function starts must not read them
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.path[0] = os.getcwd()  # as for `python -m`; else it is the folder of this file
    try:
        function = find(sys.argv[1])
    except BaseException as error:
        answer(answers, {"error": describe(error)})
        return
    answer(answers, {"value": 0.0})
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=receive, args=(requests, calls), daemon=True).start()
    while True:
        call = json.loads(calls.get())
        try:
            result = judgement(function(*call))
        except BaseException as error:
            result = {"error": describe(error)}
        answer(answers, result)


def find(name: str) -> Callable[..., Any]:
    """Import `module:function`. Raises what the import does, or TypeError if it is no reward function."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    with suppress(ValueError):  # some functions of C have no signature
        try:
            inspect.signature(function).bind("prompt", "completion", {})
        except TypeError as error:
            wants = "it is called with prompt, completion and the other fields of the record"
            raise TypeError(f"{error}; {wants}") from None
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is async, and its result is needed at once")
    return function


def judgement(result: Any) -> dict[str, Any]:
    """Return what the function says: a reward, or a pair of reward and feedback, a text or None.

    Raises TypeError for anything else.
    """
    if not isinstance(result, tuple | list):
        return {"value": number(result)}
    if len(result) != 2 or not isinstance(result[1], str | None):
        raise TypeError("the result is neither a number nor a pair of a number and a text")
    return {"value": number(result[0]), "feedback": result[1] or ""}


def number(reward: Any) -> float:
    """Return a reward as a float. Raises TypeError for texts, which float() would read."""
    if isinstance(reward, str | bytes | bytearray):
        raise TypeError(f"the reward is a {type(reward).__name__}, not a number")
    return float(reward)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def receive(requests: TextIO, calls: queue.Queue[str]) -> None:
    """Pass on the lines of `requests`. At their end, end this process and those that it started."""
    for line in requests:
        calls.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
