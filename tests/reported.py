"""Expect errors by their codes: raised in this process, or printed by another one.

One code stands for all errors with one remedy. Where a test must know which of them it was, it expects
`CODE: PART`, with a part of the error's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from mkd.errors import MkdError

_REPORT = re.compile(r"\berror(?:\[([a-z0-9-]+)\])?: ")


class Reported(str):
    """An error's code that knows its text: it equals `CODE`, and `CODE: PART` for any part of the text."""

    text: str

    @classmethod
    def of(cls, error: MkdError) -> Reported:
        """Return the code of an error."""
        return cls.from_text(error.code, str(error))

    @classmethod
    def from_text(cls, code: str, text: str) -> Reported:
        """Return `code`, which knows `text`."""
        made = cls(code)
        made.text = text
        return made

    def __eq__(self, other: object) -> bool:
        code, _, part = str(other).partition(": ")
        return str(self) == code and part in self.text

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return repr(f"{str(self)}: {self.text}")


def reports(errors: MkdError | Iterable[MkdError]) -> list[Reported]:
    """Return the codes of errors, or of one error: those of its problems if it is a list of them."""
    found = getattr(errors, "errors", [errors]) if isinstance(errors, MkdError) else errors
    return [Reported.of(error) for error in found]


def reported_codes(stderr: str) -> list[Reported]:
    """Return the code of every `error[CODE]: ...` in order; the head of a numbered list has none."""
    found = list(_REPORT.finditer(stderr))
    ends = [*(match.start() for match in found[1:]), len(stderr)]
    pairs = zip(found, ends, strict=False)  # without an error there is still an end
    return [Reported.from_text(match[1], stderr[match.end() : end]) for match, end in pairs if match[1]]


def reported_text(stderr: str) -> str:
    """Return the text after the first `error[CODE]: ` or `error: `; libraries may print warnings before."""
    found = _REPORT.search(stderr)
    return stderr[found.end() :] if found else ""


@contextmanager
def refused(expected: str, kind: type[MkdError] = MkdError) -> Iterator[pytest.ExceptionInfo[MkdError]]:
    """Check that the block raises the error `CODE` or `CODE: PART`, which says what to do."""
    with pytest.raises(kind) as caught:
        yield caught
    assert Reported.of(caught.value) == expected, caught.value.report()
    errors = getattr(caught.value, "errors", [caught.value])
    assert all(error.do for error in errors), "an error says what to do"


def assert_all_reported(results, planted):
    """Check that rank 0 alone lists these problems, each with what to do, and nothing else.

    `planted` is `CODE` or `CODE: PART` -> text that the error names.
    """
    first, second = results
    assert (first.exit_code, second.exit_code) == (64, 64), first.stderr
    assert f"error: {len(planted)} problems:\n" in first.stderr
    assert not reported_text(second.stderr) and not first.stdout
    found = reported_codes(first.stderr)
    assert len(found) == len(planted), first.stderr
    for expected, named in planted.items():
        (one,) = [one for one in found if one == expected]
        assert str(named) in one.text and "\n  do:  " in one.text, first.stderr
