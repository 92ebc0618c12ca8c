"""Read all records of a run without training: what would end it later is found now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mkd.checkpoint.hf.hf_assets import TOKENIZER_PATTERNS
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.config.data_files import data_paths, is_raw
from mkd.config.schema import Config
from mkd.data.corpus.documents import encode_documents
from mkd.data.files.named_files import named_files
from mkd.data.first_records import LOOKED_AT
from mkd.data.progress_lines import Position, ProgressLines, total_megabytes
from mkd.data.quarantine import MAX_REPORTED_ERRORS, BadRecord, skipped, too_many
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows
from mkd.data.records.wanted import WantedRecords
from mkd.errors import DataError, ErrorList, MkdError, UsageError
from mkd.human import counted
from mkd.resolve.chat_setup import chat_settings
from mkd.resolve.preflight import Tokenizers, data_problems
from mkd.tokenizers.load import load_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer


def check_data(config: Config, wanted: WantedRecords) -> Iterator[str]:
    """Read all files of the data flags as the run would, and yield a line about each path.

    The first records are tokenised too. Raises ErrorList, or an error of the files.
    """
    problems: list[MkdError] = []
    paths = data_paths(problems, config.data)
    tokenizer = _tokenizer(config)
    if not problems:
        problems += data_problems(paths, Tokenizers(tokenizer, (), None, ()), config, wanted)
    if problems:
        raise ErrorList(problems) if len(problems) > 1 else problems[0]
    for path, flag in paths.items():
        if is_raw(path):
            yield _read(named_files(path, flag).local(), path, config, tokenizer, wanted)
        else:
            yield f"{path}: tokenised"


def _tokenizer(config: Config) -> Tokenizer:
    name = config.data.tokenizer_model or config.student.hf
    if name is None:
        what, do = "no model is named whose tokenizer reads the data", "give --student-hf MODEL"
        raise UsageError(what, "", do, code="add-flag")
    folder = resolve_hf(name, TOKENIZER_PATTERNS) if config.data.tokenizer_model is None else name
    return load_tokenizer(config.data.tokenizer_type, str(folder), chat_settings(config))


def _read(
    files: Sequence[str], path: str, config: Config, tokenizer: Tokenizer, wanted: WantedRecords
) -> str:
    """Return what a path holds. Raises DataError for more bad records in a file than the run would skip."""
    limit = config.data.max_bad_records
    kinds, total, position = Counter[str](), 0, Position()
    lines = ProgressLines(f"reading {path}", total_megabytes(files), "MB", "records")
    for file in files:
        bad: list[BadRecord] = []
        for place, (number, row) in enumerate(position.follow(read_rows(file, numbers=wanted.keys), file)):
            try:
                record = parse_row(row, wanted)
                kinds[record.kind] += 1
                if place < LOOKED_AT and not record.images:
                    encode_documents(record, tokenizer, config.data.append_eod)
            except DataError as error:
                bad.append(BadRecord.from_row(file, number, row, error))
                if len(bad) >= limit + MAX_REPORTED_ERRORS:
                    break
            lines.at(position.megabytes, 1)
        if len(bad) > limit:
            raise too_many(bad[:MAX_REPORTED_ERRORS], len(bad), limit, stopped=False)
        total += len(bad)
    lines.end()
    found = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    more = f"; {skipped(total)}" if total else ""
    return f"{path}: {counted(len(files), 'file')}, {found}{more}"
