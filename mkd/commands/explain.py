"""Explain an error by its code: what it means, the texts that it has, and its exit code.

    mkd explain                    # every code, one line each
    mkd explain not-writable

An error starts with its code: `error[not-writable]: ...`. A code names what to do, so several texts may
share one; `...` is a value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from mkd.config.flags import FlagParser
from mkd.error_codes.code_meanings import MEANINGS
from mkd.error_codes.former_codes import NEW_NAMES
from mkd.error_codes.raised_errors import RaisedError, exit_codes, raised_errors, source_folders
from mkd.errors import UsageError, returns_exit_code

_EXIT_CODES = {code: exit_code for exit_code, codes in MEANINGS.items() for code in codes}


def explanation(code: str) -> str:
    """Return the text about one code. Raises UsageError if there is no such code."""
    if code not in _EXIT_CODES:
        raise _no_such(code)
    exit_code = _EXIT_CODES[code]
    lines = [f"{code}: exit code {exit_code}", "", MEANINGS[exit_code][code], ""]
    found = sorted(set(raised_errors(source_folders(), code)))
    if not found:
        return "\n".join([*lines, "This installation of mkd has no sources that hold its texts."])
    for error in found:
        lines += [*_entry(error), ""]
    files = ", ".join(sorted({error.file for error in found}))
    return "\n".join([*lines, f"from {files}"])


def _entry(error: RaisedError) -> Iterator[str]:
    yield f"* {error.first_line}"
    yield from (f"    {line}" for line in error.other_lines)


def overview() -> str:
    """Return one line for every code, by exit code."""
    width = max(map(len, _EXIT_CODES))
    lines = []
    for exit_code, meaning in exit_codes().items():
        lines += [f"exit code {exit_code}: {meaning}", ""]
        lines += [f"  {code:{width}}  {text}" for code, text in sorted(MEANINGS[exit_code].items())]
        lines.append("")
    return "\n".join([*lines, "`mkd explain CODE` shows the texts of a code."])


def _no_such(code: str) -> UsageError:
    """Return the error for a name that is no code, or no longer one."""
    if code in NEW_NAMES:
        what, do = f"the error code {code} is now {NEW_NAMES[code]}", f"mkd explain {NEW_NAMES[code]}"
        return UsageError(what, "all errors with the same remedy share one code", do, code="value-unknown")
    near = difflib.get_close_matches(code, [*_EXIT_CODES, *NEW_NAMES], n=3)
    names = dict.fromkeys(NEW_NAMES.get(name, name) for name in near)
    do = f"did you mean {' or '.join(names)}? " if names else ""
    do += "`mkd explain` lists all codes"
    return UsageError(f"{code} is not an error code of mkd", "", do, code="value-unknown")


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser("mkd explain", __doc__)
    parser.add_argument("code", nargs="?", metavar="CODE", help="the code of an error (default: all codes)")
    code = parser.parse_args(argv).code
    print(explanation(code) if code else overview())
