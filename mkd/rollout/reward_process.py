"""The process that calls a reward function: `python reward_process.py module:function`.

It imports nothing of mkd. For each call it reads a line of JSON, [prompt, completion, fields], from stdin
and writes one to stdout: {"value": number} or {"error": text}. A line before the first call says whether the
function was found. What the function prints goes to stderr. The process ends with its stdin, even in the
middle of a call.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO


def main() -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.path[0] = os.getcwd()  # as for `python -m`; else it is the folder of this file
    try:
        function = find(sys.argv[1])
    except BaseException as error:
        answer(answers, {"error": describe(error)})
        return
    answer(answers, {"value": 0.0})
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=receive, args=(calls,), daemon=True).start()
    while True:
        call = json.loads(calls.get())
        try:
            result: dict[str, Any] = {"value": float(function(*call))}
        except BaseException as error:
            result = {"error": describe(error)}
        answer(answers, result)


def find(name: str) -> Callable[..., Any]:
    """Import `module:function`. Raises what the import does, or TypeError if it cannot be called."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def receive(calls: queue.Queue[str]) -> None:
    """Pass on the lines of stdin; end the process with it."""
    for line in sys.stdin:
        calls.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
