"""Relate the vocabularies of a student and a cross-tokenizer teacher, and report how well they fit.

    mkd projection --student STUDENT_DIR --teacher TEACHER_DIR --output relation.npz \\
        --audit-data sample.jsonl

A run builds and caches the same relation by itself. Use this tool to inspect a pair before training, to make
a matrix with other settings (give the file to the run as the teacher's `xtoken.projection`), or to check a
published one.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.config.flags import FlagParser, require_new_file
from mkd.errors import DataError, returns_exit_code

if TYPE_CHECKING:  # libraries that take seconds are imported after the arguments are parsed
    from mkd.tokenizers.tokenizer import Tokenizer
    from mkd.xtoken.vocabulary.relation import VocabularyRelation

SHOWN_ROWS = 8
STAGES = ("exact", "multi", "special", "cut")  # those of mkd.xtoken.vocabulary.relation
TOP_K = 4
WRITTEN_KEYS = ("content", "reasoning_content", "tool_calls")  # of messages, those with text


def build_parser() -> argparse.ArgumentParser:
    parser = FlagParser("mkd projection", __doc__)
    add = parser.add_argument
    add(
        "--student",
        required=True,
        metavar="DIR|FILE",
        help="the student's tokenizer: model folder or Hub id, SentencePiece .model, or .tiktoken file",
    )
    add("--teacher", required=True, metavar="DIR|FILE", help="the teacher's tokenizer")
    add("--output", type=Path, metavar="FILE", help=".npz to write (default: write nothing)")
    add("--overwrite", action="store_true", help="replace the files of --output and --audit-output")
    add(
        "--projection",
        type=Path,
        metavar="FILE",
        help="file with a matrix to use instead of building one: an earlier --output, or the published dense "
        "form (.pt, .safetensors or .npz with indices and likelihoods [student vocabulary, k])",
    )
    add(
        "--stages",
        default=",".join(STAGES),
        metavar="A,B",
        help=f"parts of the matrix (default: {','.join(STAGES)})",
    )
    add(
        "--top-k",
        type=int,
        default=TOP_K,
        metavar="K",
        help="entries per row that the stage cut keeps; 4 as published (default: 4)",
    )
    add(
        "--audit-data",
        metavar="PATH",
        help="sample of the training data to align, a path as of --data-path (default: no audit)",
    )
    add(
        "--audit-texts",
        type=int,
        default=1000,
        metavar="N",
        help="texts of the sample to align (default: 1000)",
    )
    add(
        "--audit-output",
        type=Path,
        metavar="FILE",
        help="JSON file for all printed figures (default: OUTPUT with .audit.json)",
    )
    return parser


def audit_file(args: argparse.Namespace) -> Path | None:
    """Return the file for all figures; None: they are only printed."""
    return args.audit_output or (args.output and args.output.with_suffix(".audit.json"))


def run(args: argparse.Namespace) -> None:
    require_new_file("--output", args.output, args.overwrite)
    require_new_file("--audit-output", audit_file(args), args.overwrite)
    from mkd.tokenizers.load import open_tokenizer
    from mkd.xtoken.vocabulary.audit import audit
    from mkd.xtoken.vocabulary.relation import ProjectionSettings
    from mkd.xtoken.vocabulary.relation_cache import build_projection, save_relation

    start = time.perf_counter()
    student, teacher = open_tokenizer(args.student), open_tokenizer(args.teacher)
    settings = ProjectionSettings(tuple(args.stages.split(",")), args.top_k)
    relation = build_projection(student, teacher, settings=settings, projection=args.projection)
    if args.output:
        save_relation(args.output, relation, student, teacher, settings)
    figures = describe(relation, student, teacher)
    figures |= {
        "build_time_s": round(time.perf_counter() - start, 2),
        "peak_memory_gib": round(peak_memory_gib(), 3),
    }
    for line in lines(figures):
        print(line)
    if args.audit_data:
        texts = islice(texts_of(args.audit_data), args.audit_texts)
        result = audit(student, teacher, relation, texts)
        if not result.num_texts:
            raise DataError(
                f"{args.audit_data} holds no record",
                do="give a sample of the training data",
                code="data-file-empty",
            )
        figures["audit"] = result.shares()
        print(result.table())
    target = audit_file(args)
    if target:
        target.write_text(json.dumps(figures, indent=1) + "\n")


def describe(relation: VocabularyRelation, student: Tokenizer, teacher: Tokenizer) -> dict[str, Any]:
    """Return sizes and coverage as JSON values."""
    import numpy as np

    empty = relation.projection.empty_rows
    with_bytes = np.array([own is not None for own in student.token_bytes])
    return {
        "student_size": relation.student_size,
        "teacher_size": relation.teacher_size,
        "common": len(relation.common_student),
        "relaxed": len(relation.relaxed_student),
        "entries": len(relation.projection.values),
        "rows": relation.student_size - len(empty),
        "columns": len(np.unique(relation.projection.columns)),
        "empty_rows": len(empty),
        "empty_rows_with_bytes": int(with_bytes[empty].sum()),
        "empty_row_ids": empty.tolist(),
        "one_to_many": len(relation.spellings.students.tokens),
        "many_to_one": len(relation.spellings.teachers.tokens),
    }


def lines(figures: dict[str, Any]) -> Iterator[str]:
    sizes = figures["student_size"], figures["teacher_size"]
    yield f"vocabularies: student {sizes[0]}, teacher {sizes[1]}"
    yield (
        f"common tokens: {figures['common']}, {figures['common'] / sizes[0]:.3f} of the student's and "
        f"{figures['common'] / sizes[1]:.3f} of the teacher's; {figures['relaxed']} more in the relaxed map"
    )
    yield (
        f"tokens in several pieces: {figures['one_to_many']} of the student's as the teacher writes them, "
        f"{figures['many_to_one']} of the teacher's as the student writes them"
    )
    yield (
        f"projection: {figures['rows']} rows with support, {figures['entries']} entries, "
        f"on {figures['columns']} of the teacher's tokens"
    )
    shown = ", ".join(map(str, figures["empty_row_ids"][:SHOWN_ROWS]))
    more = ", ..." if figures["empty_rows"] > SHOWN_ROWS else ""
    yield (
        f"rows without support: {figures['empty_rows']}, "
        f"{figures['empty_rows_with_bytes']} of them with bytes" + (f" (ids {shown}{more})" if shown else "")
    )
    yield f"built in {figures['build_time_s']:.1f} s, peak memory {figures['peak_memory_gib']:.2f} GiB"


def texts_of(path: str) -> Iterator[str]:
    """Yield the texts of a path's records: every message, prompt and completion is one."""
    from mkd.data.files.named_files import all_local
    from mkd.data.records.parsing import parse_row
    from mkd.data.records.rows import read_rows

    for file in all_local([path], "--audit-data"):
        for number, row in read_rows(file):
            try:
                record = parse_row(row)
            except DataError as error:
                raise error.located(f"{file}:{number}") from error
            for value in record.values:
                yield from (value,) if isinstance(value, str) else _texts_of_messages(value.messages)


def _texts_of_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from mkd.data.records.messages import texts_of as texts_of_message

    for message in messages:
        yield from texts_of_message({key: value for key, value in message.items() if key in WRITTEN_KEYS})


def peak_memory_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    run(build_parser().parse_args(argv))
