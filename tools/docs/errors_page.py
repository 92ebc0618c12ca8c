"""Make one page of every error that mkd can report, by code, with its texts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from mkd import errors
from mkd.error_codes.code_meanings import MEANINGS
from mkd.error_codes.raised_errors import RaisedError, exit_codes, raised_errors, source_folders

_INTRODUCTION = """# Errors

Every error has a code, which stands for what to do: `error[batch-not-divisible]: ...`. The message says what
is wrong, why that matters and what to do. Several problems at once form a numbered list. This page lists all
codes in alphabetical order; `...` stands for a value. Where a text has several reasons (why) or fixes (do), a
message gives those of its case.

| exit code | meaning |
|---|---|
"""


def errors_page() -> str:
    """Return the page for the sources of this mkd."""
    return page_of(raised_errors(source_folders()))


def page_of(raised: Iterable[RaisedError]) -> str:
    """Return the page for these errors."""
    meanings = {code: text for codes in MEANINGS.values() for code, text in codes.items()}
    kinds = "\n".join(f"| {exit_code} | {meaning} |" for exit_code, meaning in exit_codes().items())
    interrupted = f"| {errors.EXIT_INTERRUPTED} | The second Ctrl-C. The run ended at once, without a save. |"
    lines = [f"{_INTRODUCTION}{kinds}\n{interrupted}", ""]
    for code, same in groupby(sorted(set(raised)), key=lambda error: error.code):
        texts = list(same)
        files = ", ".join(sorted({error.file for error in texts}))
        lines += [f"## {code}\n", f"{meanings[code]} Exit code {texts[0].exit_code}. {files}\n"]
        lines += [*dict.fromkeys(map(_entry, texts)), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _entry(error: RaisedError) -> str:
    """Return the item of a list."""
    return "  \n".join([f"* **{error.first_line}**", *(f"  {line}" for line in error.other_lines)])
