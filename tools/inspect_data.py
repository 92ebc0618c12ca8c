"""Look at training data as two models see it: which tokens of student and teacher stand for the same text.

    python tools/inspect_data.py --align --input a.jsonl --student MODEL_DIR --teacher MODEL_DIR [--limit 3]

Chunks alternate between two colours (none where the output is not a terminal, or NO_COLOR is set).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.data.documents import Record, parse_row, read_rows  # noqa: E402
from mkd.errors import EXIT_DONE, DataError, MkdError  # noqa: E402
from mkd.tokenizers.load import open_tokenizer  # noqa: E402
from mkd.tokenizers.tokenizer import Tokenizer  # noqa: E402
from mkd.xtoken import AlignedText, align, align_chat, align_completion  # noqa: E402
from mkd.xtoken.align_view import view_alignment  # noqa: E402

TOKENIZER = "folder or Hub id of a model, a SentencePiece .model file, or a .tiktoken rank file"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--align", action="store_true", required=True, help="show the aligned chunks of each record")
    add("--input", required=True, metavar="FILE",
        help=".jsonl, .json, .parquet or .arrow file with text, messages, or prompt and completion")  # fmt: skip
    add("--student", required=True, metavar="TOKENIZER", help=TOKENIZER)
    add("--teacher", required=True, metavar="TOKENIZER", help="the same of the teacher")
    add("--mode", default="byte_offset", help="byte_offset (default) or dp")
    add("--reasoning", action=argparse.BooleanOptionalAction, default=True,
        help="align reasoning of conversations too (default: yes)")  # fmt: skip
    add("--limit", type=int, default=3, metavar="N", help="records to show (default 3)")
    return parser


def aligned_records(args: argparse.Namespace, student: Tokenizer, teacher: Tokenizer) -> Iterator[tuple[int, AlignedText]]:
    """(row number, alignment) of the first records of a file. Raises MkdError that names file and row."""
    for number, row in islice(read_rows(args.input), args.limit):
        try:
            yield number, align_record(parse_row(row), args, student, teacher)
        except DataError as error:
            raise DataError(f"{args.input}:{number}: {error.what}", error.why, error.do) from error


def align_record(record: Record, args: argparse.Namespace, student: Tokenizer, teacher: Tokenizer) -> AlignedText:
    if record.kind == "messages":
        return align_chat(student, teacher, record.values[0], reasoning=args.reasoning, mode=args.mode)
    if record.kind == "prompt-completion":
        return align_completion(student, teacher, *record.values, mode=args.mode)
    return align(student, teacher, record.values[0], mode=args.mode)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        student, teacher = open_tokenizer(args.student), open_tokenizer(args.teacher)
        for number, aligned in aligned_records(args, student, teacher):
            print(f"{args.input}:{number}: {view_alignment(aligned, student, teacher, colour=colour)}\n")
    except MkdError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
