"""Expect errors by their codes: raised in this process, or printed by another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mkd.errors import MkdError

_REPORT = re.compile(r"\berror(?:\[([a-z0-9-]+)\])?: ")


def reported_codes(stderr: str) -> list[str]:
    """Return the code of every `error[CODE]: ...` in order; the head of a numbered list has none."""
    return [code for code in _REPORT.findall(stderr) if code]


def reported_text(stderr: str) -> str:
    """Return the text after the first `error[CODE]: ` or `error: `; libraries may print warnings before."""
    found = _REPORT.search(stderr)
    return stderr[found.end() :] if found else ""


@contextmanager
def refused(code: str, kind: type[MkdError] = MkdError) -> Iterator[pytest.ExceptionInfo[MkdError]]:
    """Check that the block raises the error with this code, which says what to do."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, caught.value.report()
    errors = getattr(caught.value, "errors", [caught.value])
    assert all(error.do for error in errors), "an error says what to do"
