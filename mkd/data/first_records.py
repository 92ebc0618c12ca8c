"""The kinds of the first records of each file, which tell early what a run would meet. It needs no torch."""

from __future__ import annotations

import sys
from itertools import islice

from mkd.data.files.named_files import named_files
from mkd.data.quarantine import MAX_REPORTED_ERRORS, BadRecord, too_many
from mkd.data.records.kinds import MESSAGES, PAIR, SEGMENTS, TOKENS
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import DataError

LOOKED_AT = 100  # records read of the first raw file of a path; more if --max-bad-records is larger
LOOKED_AT_LATER = 10  # of its next files
MOST_FILES = 200  # of a path
CONVERSATION_PAIR = "pair of conversations"  # a kind of its own here: the chat template makes its tokens
CONVERSATIONS = {MESSAGES, CONVERSATION_PAIR}  # kinds that need a chat template
GIVEN = {SEGMENTS, TOKENS}  # kinds whose tokens are all given
WITHOUT_EOS = CONVERSATIONS | GIVEN  # kinds to which no EOS is added


def kinds_of_records(
    flag: str, path: str, max_bad_records: int, wanted: WantedRecords = ANY_RECORDS
) -> set[str]:
    """Return the kinds of the first records of every file that `path` names and that is on this machine.

    Raises DataError if there is none, and, as the run would, if too many records are bad.
    """
    kinds = set[str]()
    looked_at = min(max(LOOKED_AT, max_bad_records + 1), sys.maxsize)
    for file in named_files(path, flag).at_hand()[:MOST_FILES]:
        bad = list[BadRecord]()
        for number, row in islice(read_rows(file, numbers=wanted.keys), looked_at):
            try:
                record = parse_row(row, wanted)
                is_conversation = record.kind == PAIR and not isinstance(record.values[0], str)
                kinds.add(CONVERSATION_PAIR if is_conversation else record.kind)
            except DataError as error:
                bad.append(BadRecord.from_row(f"{flag} {file}", number, row, error))
        if len(bad) > max_bad_records and kinds:
            raise too_many(bad[:MAX_REPORTED_ERRORS], len(bad), max_bad_records, stopped=False)
        if bad and not kinds:
            raise bad[0]
        looked_at = min(looked_at, LOOKED_AT_LATER)
    if not kinds:
        what = f"{flag} {path} is empty"
        why = "there is nothing to train on"
        raise DataError(what, why, "check how it was made", code="data-file-empty")
    return kinds
