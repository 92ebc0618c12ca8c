"""Work on training data: show it as models see it, or read all of it before a run.

    mkd data preview PATH --student MODEL_DIR [--seq-length 2048] [--limit 3]
    mkd data check --config FILE.yaml [--student-hf MODEL_DIR]

`mkd data preview --help` describes the first. `mkd data check` takes the flags of `mkd train`. It reads every
record of --data-path and --valid-data-path, tokenises the first ones, and names what would end the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mkd.commands import inspect
from mkd.config.flags import FlagParser
from mkd.errors import EXIT_DONE, returns_exit_code


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the part of the command that the first word names."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["preview"]:
        return int(inspect.main(words[1:], "mkd data preview"))
    if words[:1] == ["check"] and not {"-h", "--help"} & set(words):
        return check(words[1:])
    parser = FlagParser("mkd data", __doc__)
    parser.add_argument(
        "part",
        choices=("preview", "check"),
        help="preview: show packs, masks, roles and sizes. check: read all records of a run",
    )
    parser.parse_args(words)
    return EXIT_DONE


def check(words: Sequence[str]) -> int:
    """Read all data of the run that `words` describe, and print what there is."""
    from mkd.config.load import load_config

    config = load_config(words).config
    from mkd.platform import prepare_for_files

    prepare_for_files()  # before mkd.data imports Megatron
    from mkd.kinds.known_kinds import wanted_records
    from mkd.operations.console import console
    from mkd.resolve.data_check import check_data

    with console(0):
        for line in check_data(config, wanted_records(config)):
            print(line)
    return EXIT_DONE
