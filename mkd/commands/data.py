"""Work on training data: show it as models see it, or read all of it before a run.

    mkd data preview PATH --student MODEL_DIR [--seq-length 2048] [--limit 3]
    mkd data check --config FILE.yaml [--student-hf MODEL_DIR]
    mkd data convert-records --from slime|verl|prime-rl DUMP ... --out FILE.jsonl [--version RUN-N | --tokens]

`mkd data preview --help` describes the first. `mkd data check` takes the flags of `mkd train`. It reads every
record of --data-path and --valid-data-path, tokenises the first ones, and names what would end the run.
`mkd data convert-records` writes rollouts of other programs as records of agents (docs/agent-records.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mkd.commands import inspect
from mkd.config.flags import FlagParser
from mkd.errors import EXIT_DONE, UsageError, returns_exit_code
from mkd.human import counted


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the part of the command that the first word names."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["preview"]:
        return int(inspect.main(words[1:], "mkd data preview"))
    if words[:1] == ["check"] and not {"-h", "--help"} & set(words):
        return check(words[1:])
    if words[:1] == ["convert-records"]:
        return convert(words[1:])
    parser = FlagParser("mkd data", __doc__)
    parser.add_argument(
        "part",
        choices=("preview", "check", "convert-records"),
        metavar="preview, check or convert-records",
        help="preview: show packs, masks, roles and sizes. check: read all records of a run. "
        "convert-records: rollouts of other programs as records",
    )
    parser.parse_args(words)
    return EXIT_DONE


def convert(words: Sequence[str]) -> int:
    """Write the rollouts of another program as records."""
    parser = FlagParser("mkd data convert-records", "Write rollouts of other programs as records of agents.")
    add = parser.add_argument
    add("dumps", nargs="+", help="files that the other program wrote")
    add("--from", dest="program", choices=("prime-rl", "verl", "slime"), required=True, help="the program")
    add("--out", required=True, help="file of the records, which gets its name when it is complete")
    add("--version", help="weights that sampled them: version of progress.json (default: as the dump says)")
    add("--reward-key", help="name of the reward, where a dump has several (default: the only one)")
    add("--tokens", action="store_true", help="write tokens with their loss, for training on stored text")
    args = parser.parse_args(list(words))
    from mkd.kinds.sampled.records.other_programs import convert_dumps, convert_to_tokens

    out = Path(args.out)
    if out.exists():
        what, why = f"--out {out} exists", "a run may have read it, and files of records never change"
        raise UsageError(what, why, "choose another name", code="already-exists")
    records = (
        convert_to_tokens(args.program, args.dumps)
        if args.tokens
        else convert_dumps(args.program, args.dumps, args.version, args.reward_key)
    )
    draft, count = out.with_name(f".{out.name}.partial"), 0
    with draft.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            count += 1
    draft.replace(out)
    print(f"{counted(count, 'record')} in {out}")
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
