"""Reward functions for tests, as a user would write them: they import nothing of mkd."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def of_length(prompt, completion, fields):
    """Reward depends on all three arguments, and differs within most groups."""
    return (len(completion) % 5) + 0.25 * (fields["answer"] % 3) + 0.5 * prompt.count("fox")


def quickly(prompt, completion, fields):
    """Reward the share of blanks."""
    print("a function may print")
    return completion.count(" ") / max(len(completion), 1)


def with_feedback(prompt, completion, fields):
    """Reward a length, and say something about short texts."""
    length = len(completion)
    return length % 4 / 2, f"only {length} letters" if length % 2 else None


def pair_of(prompt, completion, fields):
    """Return the pair that `fields` have."""
    return tuple(fields["pair"])


def libraries(prompt, completion, fields):
    """Count what a process for rewards should not have loaded."""
    return float(sum(name in sys.modules for name in ("torch", "numpy", "mkd", "megatron")))


def process(prompt, completion, fields):
    return os.getpid()


def misbehave(prompt, completion, fields):
    """Fail as `completion` says."""
    if completion == "raise":
        raise KeyError("no answer")
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(3)
    if completion == "hang":
        time.sleep(600)
    return {"nan": float("nan"), "infinite": float("inf"), "huge": -1e200, "none": None, "text": "1.0"}.get(
        completion, 1
    )


def raises_sometimes(prompt, completion, fields):
    if len(completion) % 4 == 0:
        raise ValueError("a multiple of 4")
    return len(completion)


def always_raises(prompt, completion, fields):
    raise ValueError("no answer")


def hangs_once(prompt, completion, fields):
    """Hang for the second completion of this process."""
    hangs_once.calls = getattr(hangs_once, "calls", 0) + 1
    if hangs_once.calls == 2:
        time.sleep(600)
    return len(completion)


def starts_a_program(prompt, completion, fields):
    """Start a program that reads stdin to its end."""
    return float(len(subprocess.run(["cat"], check=True, stdout=subprocess.PIPE).stdout))


def leaves_a_program(prompt, completion, fields):
    """Hang after a program was started, whose number is in the file `completion`."""
    started = subprocess.Popen(["sleep", "600"])
    with open(completion, "w") as file:
        file.write(str(started.pid))
    time.sleep(600)


def slowly(prompt, completion, fields):
    time.sleep(0.2)
    return float(len(completion))


def never_a_number(prompt, completion, fields):
    return float("nan")


NOT_A_FUNCTION = 3
