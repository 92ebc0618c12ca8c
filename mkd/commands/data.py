"""Work on training data: show it as models see it.

    mkd data preview PATH --student MODEL_DIR [--seq-length 2048] [--limit 3]

`mkd data preview --help` describes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mkd.commands import inspect
from mkd.config.flags import FlagParser
from mkd.errors import returns_exit_code


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the part of the command that the first word names."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["preview"]:
        return int(inspect.main(words[1:], "mkd data preview"))
    parser = FlagParser("mkd data", __doc__)
    parser.add_argument("part", choices=("preview",), help="preview: show packs, masks, roles and sizes")
    parser.parse_args(words)
    return 0
