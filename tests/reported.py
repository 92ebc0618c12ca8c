"""Read the errors that a process has printed: their codes, and the text of the first one."""

from __future__ import annotations

import re

_REPORT = re.compile(r"\berror(?:\[([a-z0-9-]+)\])?: ")


def reported_codes(stderr: str) -> list[str]:
    """Return the code of every `error[CODE]: ...` in order; the head of a numbered list has none."""
    return [code for code in _REPORT.findall(stderr) if code]


def reported_text(stderr: str) -> str:
    """Return the text after the first `error[CODE]: ` or `error: `; libraries may print warnings before."""
    found = _REPORT.search(stderr)
    return stderr[found.end() :] if found else ""
