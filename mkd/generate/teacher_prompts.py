"""The prompts of a job: as records have them, and in the teacher's tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.chat.sampled_prompts import in_chat
from mkd.data.files.named_files import all_local
from mkd.data.prompts import parse_prompt
from mkd.data.quarantine import BadRecord, too_many
from mkd.data.records.rows import read_rows
from mkd.errors import DataError
from mkd.human import counted
from mkd.tokenizers.chat_input import Conversation


@dataclass(frozen=True)
class TeacherPrompt:
    """One prompt."""

    number: int  # among all records of the files, bad ones included: it seeds the completions
    path: str  # its file
    line: int  # its line or row there, from 1
    prompt: str | Conversation
    fields: Mapping[str, Any]  # all other keys of its record
    ids: np.ndarray  # [p] int64, as the teacher reads it


@dataclass(frozen=True)
class TeacherPrompts:
    """All prompts of the files, in their order."""

    prompts: Sequence[TeacherPrompt]
    bad: Sequence[BadRecord]
    fingerprint: str  # SHA-256 of places, tokens and fields

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return max(len(one.ids) for one in self.prompts)

    def describe(self) -> str:
        """Return a line with the sizes."""
        lengths = [len(one.ids) for one in self.prompts]
        bad = f", {counted(len(self.bad), 'bad record')} skipped" if self.bad else ""
        return f"{counted(len(lengths), 'prompt')} of {min(lengths)} to {max(lengths)} tokens{bad}"


def read_teacher_prompts(
    paths: Sequence[str],
    encode: Callable[[str | Conversation], np.ndarray],  # the teacher's tokens; raises DataError
    as_chat: bool,
    system: str | None,
    max_bad_records: int,  # of each file
) -> TeacherPrompts:
    """Read and tokenise all prompts. `as_chat` makes a user's message of every text.

    Raises DataError, or ErrorList with the first bad records of a file that has too many.
    """
    prompts: list[TeacherPrompt] = []
    all_bad: list[BadRecord] = []
    digest = hashlib.sha256()
    number = -1
    for path in all_local(paths, "--prompts"):
        bad: list[BadRecord] = []
        for line, row in read_rows(path, whole=True):
            number += 1
            try:
                parsed, fields = parse_prompt(row)
                prompt = in_chat(parsed, as_chat, system)
                ids = encode(prompt)
            except DataError as error:
                bad.append(BadRecord.from_row(path, line, row, error))
                continue
            prompts.append(TeacherPrompt(number, path, line, prompt, fields, ids))
            digest.update(number.to_bytes(8, "little") + len(ids).to_bytes(8, "little") + ids.tobytes())
            digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
        if len(bad) > max_bad_records:
            raise too_many(bad, len(bad), max_bad_records, stopped=False)
        all_bad += bad
    if not prompts:
        what = f"--prompts {' '.join(paths)} has no prompt"
        raise DataError(what, "there is nothing to complete", "check how it was made", code="data-file-empty")
    return TeacherPrompts(prompts, all_bad, "sha256:" + digest.hexdigest())
