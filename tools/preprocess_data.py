"""Tokenise files of records into a Megatron .bin/.idx corpus: once, instead of at the start of every run.

    python tools/preprocess_data.py --input a.jsonl b.parquet --output-prefix corpus/ab \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL_DIR --workers 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import UsageError, returns_exit_code  # noqa: E402

if TYPE_CHECKING:
    from mkd.data.store_builder import StoreSummary


def build_parser() -> argparse.ArgumentParser:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl, .json, .parquet or .arrow files with text, messages, or prompt and completion; of a .txt file every line "
        "that is not blank is a document, see --characters-per-sample",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="PREFIX.bin, PREFIX.idx, PREFIX.meta.json and, where not every token has loss, PREFIX.loss_mask.bin",
    )
    add(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        help="HuggingFaceTokenizer (default), SentencePieceTokenizer or TiktokenTokenizer",
    )
    add(
        "--tokenizer-model",
        required=True,
        metavar="DIR_OR_ID_OR_FILE",
        help="folder or Hub id of a model, or a SentencePiece .model file",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that tokenise (default 1); the result does not depend on it",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every text and completion with the tokenizer's end-of-sequence token (default: yes)",
    )
    add(
        "--characters-per-sample",
        type=int,
        metavar="N",
        help="join consecutive text records (of a .txt file its lines, blank ones too) with a newline until a document has at "
        "least so many characters, as the flag of pretrain_kd.py does; other records stay as they are (default: every "
        "record is a document)",
    )
    add(
        "--max-bad-records",
        type=int,
        default=0,
        metavar="N",
        help="records that may be left out because they cannot be read (default 0); see PREFIX.quarantine.jsonl",
    )
    return parser


def preprocess(args: argparse.Namespace) -> StoreSummary:
    if args.workers < 1:
        raise UsageError(f"--workers {args.workers} is not a number of processes", do="use 1 or more")
    if args.max_bad_records < 0:
        raise UsageError(
            f"--max-bad-records {args.max_bad_records} is not a number of records", do="use 0 or more"
        )
    characters = args.characters_per_sample
    if characters is not None and characters < 1:
        raise UsageError(
            f"--characters-per-sample {characters} is not a number of characters", do="use 1 or more"
        )
    # Not by the workers, who import this file.
    from mkd.platform import prepare_for_files

    prepare_for_files()
    from mkd.data.store_builder import build_store
    from mkd.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer_type, args.tokenizer_model)
    workers = 0 if args.workers == 1 else args.workers  # a single worker needs no process of its own
    return build_store(
        args.input,
        args.output_prefix,
        tokenizer,
        args.append_eod,
        workers,
        characters_per_sample=characters,
        max_bad_records=args.max_bad_records,
    )


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    start = time.perf_counter()
    summary = preprocess(args)
    seconds = time.perf_counter() - start
    print(
        f"{args.output_prefix}: {summary.documents} documents, {summary.tokens} tokens,"
        f" {summary.loss_tokens} loss tokens, {summary.tokens / seconds:.0f} tokens/s"
        + (f"; {summary.bad_records} bad records skipped" if summary.bad_records else "")
    )


if __name__ == "__main__":
    sys.exit(main())
