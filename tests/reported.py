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


def assert_all_reported(results, planted):
    """Check that rank 0 alone lists these problems (code -> text), each with what to do, and nothing else."""
    first, second = results
    assert (first.exit_code, second.exit_code) == (64, 64), first.stderr
    assert f"error: {len(planted)} problems:\n" in first.stderr
    assert not reported_text(second.stderr) and not first.stdout
    shown = re.split(r"^\[\d\] ", first.stderr.partition("problems:\n")[2], flags=re.M)[1:]
    assert sorted(reported_codes(first.stderr)) == sorted(planted)
    for code, named in planted.items():
        (text,) = [text for text in shown if text.startswith(f"error[{code}]: ")]
        assert str(named) in text and "\n  do:  " in text, first.stderr
