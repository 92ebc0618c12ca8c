"""Check this machine and its Python environment, and say how to fix what a run needs.

    mkd doctor [--folder DIR]

Starts no run and changes nothing. The output is one block to paste into a report; variables that may hold a
secret are left out. The exit code is 0 if a run can start here, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkd.config.flags import FlagParser
from mkd.doctor import describe, examine, is_healthy
from mkd.errors import returns_exit_code


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    parser = FlagParser("mkd doctor", __doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="where runs are to be written (default: runs)"
    )
    findings = examine(parser.parse_args(argv).folder)
    print(describe(findings))
    return 0 if is_healthy(findings) else 1
