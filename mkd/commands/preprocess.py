"""Tokenise files of records into a Megatron .bin/.idx corpus, once instead of at the start of every run.

    mkd preprocess --input a.jsonl b.parquet --output-prefix corpus/ab \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL_DIR --workers 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mkd.commands.chat_flags import add_chat_flags, chat_of
from mkd.config.flags import FlagParser
from mkd.errors import UsageError, returns_exit_code
from mkd.human import counted

if TYPE_CHECKING:  # it loads torch
    from mkd.data.corpus.store_builder import StoreSummary


def build_parser() -> argparse.ArgumentParser:
    parser = FlagParser("mkd preprocess", __doc__)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="paths of records to read, as --data-path of a run names them: files, folders, patterns and "
        "data sets of the hub. Records have text, messages, or prompt and completion. Every line of a .txt "
        "file that is not blank is a document",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="prefix of the files to write: PREFIX.bin, .idx, .meta.json and, unless every token has loss, "
        ".loss_mask.bin",
    )
    add("--overwrite", action="store_true", help="replace the corpus that PREFIX holds")
    add(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        help="kind: HuggingFaceTokenizer (default), SentencePieceTokenizer or TiktokenTokenizer",
    )
    add(
        "--tokenizer-model",
        required=True,
        metavar="DIR_OR_ID_OR_FILE",
        help="model folder, hub id, SentencePiece .model or .tiktoken file",
    )
    _add_record_flags(add)
    add_chat_flags(add)
    _add_image_flags(add)
    return parser


def _add_record_flags(add: Callable[..., object]) -> None:
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that tokenise. The result does not depend on it (default: 1)",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every text and completion with the tokenizer's end-of-sequence token (default: yes)",
    )
    add(
        "--numbers",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys of a number in each record that the loss of the run reads, such as that of --weight-key "
        "(default: none)",
    )
    add(
        "--tag-key",
        metavar="KEY",
        help="key of the tag in every record, as that of the run (default: tags are not kept)",
    )
    add(
        "--max-bad-records",
        type=int,
        default=0,
        metavar="N",
        help="unreadable records to leave out, at most, listed in PREFIX.quarantine.jsonl (default: 0)",
    )


def _add_image_flags(add: Callable[..., object]) -> None:
    add(
        "--image-root",
        metavar="DIR",
        help="folder of the images that records name by path. Links must stay inside, and nothing is fetched "
        "over the network (default: records hold all their images)",
    )
    add(
        "--max-image-pixels",
        type=int,
        default=1 << 26,
        metavar="N",
        help="pixels of the largest image that is decoded. A larger one is a bad record "
        f"(default: {1 << 26})",
    )
    add(
        "--max-image-side",
        type=int,
        metavar="N",
        help="pixels of a side to which the image processor reduces images, as in training (default: as "
        "preprocessor_config.json says)",
    )


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UsageError for a number that is out of range."""
    for name in ("max_image_pixels", "max_image_side"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} {value} is not a number of pixels",
                do="use 1 or more",
                code="out-of-range",
            )


def require_room(args: argparse.Namespace) -> None:
    """Raise UsageError if files of PREFIX would be replaced."""
    from mkd.data.corpus.store import StoreFiles

    files = StoreFiles(args.output_prefix).in_order
    found = [str(file).removeprefix(args.output_prefix) for file in files if file.exists()]
    if found and not args.overwrite:
        raise UsageError(
            f"--output-prefix {args.output_prefix} holds a corpus: {', '.join(found)}",
            "it would be replaced",
            "choose another prefix, or give --overwrite to replace it",
            code="already-exists",
        )


def preprocess(args: argparse.Namespace) -> StoreSummary:
    if args.workers < 1:
        raise UsageError(
            f"--workers {args.workers} is not a number of processes", do="use 1 or more", code="out-of-range"
        )
    if args.max_bad_records < 0:
        raise UsageError(
            f"--max-bad-records {args.max_bad_records} is not a number of records",
            do="use 0 or more",
            code="out-of-range",
        )
    check_numbers(args)
    # not in the workers, which import this file
    from mkd.platform import prepare_for_files

    prepare_for_files()
    require_room(args)
    from mkd.data.corpus.store_builder import build_store
    from mkd.data.files.named_files import all_local, require_files
    from mkd.data.images.conversation import image_reader
    from mkd.data.records.wanted import WantedRecords
    from mkd.data.workers import worker_deaths_explained
    from mkd.operations.console import console
    from mkd.tokenizers.load import load_tokenizer

    for path in args.input:
        require_files(path, "--input")
    tokenizer = load_tokenizer(args.tokenizer_type, args.tokenizer_model, chat_of(args))
    workers = 0 if args.workers == 1 else args.workers  # a single worker needs no separate process
    with worker_deaths_explained(), console(0):
        summary = build_store(
            all_local(args.input, "--input"),
            args.output_prefix,
            tokenizer,
            args.append_eod,
            workers,
            wanted=WantedRecords(numbers=tuple(args.numbers), tag=args.tag_key),
            max_bad_records=args.max_bad_records,
            images=image_reader(
                args.tokenizer_model, tokenizer, args.image_root, args.max_image_pixels, args.max_image_side
            ),
        )
    if {"messages", "pair"} & set(summary.kinds):
        print(*tokenizer.describe_chat(), sep="\n")
    return summary


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    start = time.perf_counter()
    summary = preprocess(args)
    seconds = time.perf_counter() - start
    from mkd.data.quarantine import skipped

    bad = skipped(summary.bad_records, f"{args.output_prefix}.quarantine.jsonl")
    print(
        f"{args.output_prefix}: {counted(summary.documents, 'document')}, {summary.tokens} tokens, "
        f"{summary.loss_tokens} loss tokens, {summary.tokens / seconds:.0f} tokens/s"
        + (f", {summary.images} images, {summary.images / seconds:.1f} images/s" if summary.images else "")
        + (f"; {bad}" if bad else "")
    )
    for line in summary.note_lines():
        print(line)
