"""Import what may kill its process in a child process, and say what came of it; for `mkd doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

PROBE_TIMEOUT_S = 180


@dataclass(frozen=True)
class Probe:
    """The answer of a child process about a module: `found`, or the last line of its traceback."""

    found: dict[str, Any]
    error: str = ""
    traceback: str = ""


def probe(code: str) -> Probe:
    """Run `code`, which sets a dict `found`, in a child process with this interpreter."""
    code += "\nimport json\nprint('\\n' + json.dumps(found))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe({}, f"{type(error).__name__}: {error}"[:200])
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [
            f"the import ended its process with code {done.returncode}"
        ]
        return Probe({}, lines[-1][:300], done.stderr)
    try:
        return Probe(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return Probe({}, "the import printed unreadable output")
