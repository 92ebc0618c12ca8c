"""Prompts for the student to complete, from files of records, in the student's tokens."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mkd.data.files.named_files import all_local, named_files
from mkd.data.prompt_readers import PromptReader, encode_prompt
from mkd.data.quarantine import MAX_REPORTED_ERRORS, BadRecord, skipped
from mkd.data.records.conversations import MESSAGE_KEYS, ConversationReader
from mkd.data.records.file_notes import LOOKED_AT, control_token_note
from mkd.data.records.ignored_keys import IgnoredKeys, ignored_keys
from mkd.data.records.kinds import MESSAGES, PROMPT_COMPLETION, Record
from mkd.data.records.parsing import check_size
from mkd.data.records.refused_keys import refuse_in_prompt
from mkd.data.records.rows import Row, raw_fields, read_rows
from mkd.data.records.values import check_string
from mkd.data.records.wanted import WantedRecords
from mkd.errors import DataError, ErrorList
from mkd.human import counted
from mkd.tokenizers.chat_input import ASSISTANT, Conversation
from mkd.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("mkd")
KEYS = ("prompt", "messages", "conversations")
NOTHING = np.zeros(0, dtype=np.int64)
RECORDS_PER_TRIAL = 64  # of which a few show whether the chat template reads a key of messages


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    ids: np.ndarray  # [p] int64, at least one
    path: str  # its file
    line: int  # its line or row there, from 1
    fields: Mapping[str, Any]  # all other keys of its record
    is_chat: bool = False  # a conversation, whose answer ends with the end of a turn
    # Teacher that reads other tokens -> these; without an entry, the completions have nothing for it.
    of_teachers: Mapping[str, np.ndarray] = field(default_factory=dict)
    tag: str = ""  # of its record or file; "": tags are not read
    asked: str | Conversation | None = None  # its text, if teachers' prompts are made in each step


@dataclass(frozen=True)
class PromptSet:
    """All prompts of the files, in their order."""

    prompts: Sequence[Prompt]
    num_bad_records: int
    fingerprint: str  # SHA-256 of the tokens of all prompts, of teachers too; with rewards also of fields
    bad_records: Sequence[Mapping[str, Any]] = ()  # lines for the quarantine file

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tags(self) -> list[str]:
        """Tags of the prompts, without repetition, sorted; [] if tags are not read."""
        return sorted({one.tag for one in self.prompts if one.tag})

    def describe(self, quarantine: str = "") -> str:
        """Return a line with the sizes. `quarantine` is the file that lists bad records."""
        lengths = [len(one.ids) for one in self.prompts]
        bad = skipped(self.num_bad_records, quarantine)
        line = f"{counted(len(self), 'prompt')} of {min(lengths)} to {max(lengths)} tokens"
        return f"{line}, {bad}" if bad else line


def read_prompts(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    longest: int,  # tokens that a prompt may have
    vocab_size: int,  # ids known to all models of the run
    max_bad_records: int = 0,  # of each file
    teachers: Mapping[str, PromptReader] = MappingProxyType({}),  # name -> teacher that reads other tokens
    with_fields: bool = False,  # the other keys of a record are read, so that the fingerprint covers them
    wanted: WantedRecords | None = None,  # whose tag is read; None: prompts have no tags
    file_tags: Mapping[str, str] = MappingProxyType({}),  # path -> tag of its prompts without one
    progress: Callable[[], None] = lambda: None,  # called for each record
) -> PromptSet:
    """Read and tokenise all prompts, each model in its own chat template.

    A prompt without a tag is a bad record, if tags are read. Raises DataError, or ErrorList with the first
    ten bad records; those of a teacher have its name.
    """
    prompts: list[Prompt] = []
    all_bad: list[BadRecord] = []
    own_keys = (one.context.keys for one in teachers.values() if one.context)
    contexts = tuple(dict.fromkeys(chain.from_iterable(own_keys)))
    is_made = any(one.made for one in teachers.values())
    read_keys = (*contexts, *(() if wanted is None else wanted.keys))
    for path, file_tag in _files(paths, file_tags):
        parsed = []
        bad: list[BadRecord] = []
        for number, row in read_rows(path, whole=True):
            progress()
            try:
                prompt, fields = parse_prompt(row, contexts)
                ids = encode_prompt(prompt, tokenizer)
                _check_ids(ids, longest, vocab_size)
                tag = "" if wanted is None else _tag(wanted, fields, file_tag)
            except DataError as error:
                bad.append(BadRecord.from_row(path, number, row, error))
                continue
            parsed.append((prompt, fields))
            theirs = {}
            for name, reader in teachers.items():
                if reader.context is not None and not reader.context.teaches(tag):
                    continue
                try:
                    if (its_ids := reader.read(prompt, fields)) is not None:
                        theirs[name] = its_ids
                except DataError as error:
                    bad.append(BadRecord.from_row(path, number, row, error).for_teacher(name))
                    break
            else:
                is_chat = isinstance(prompt, Conversation)
                asked = prompt if is_made else None
                prompts.append(Prompt(ids, path, number, fields, is_chat, theirs, tag, asked))
        _log_ignored(path, parsed, tokenizer, with_fields, read_keys)
        if len(bad) > max_bad_records:
            raise bad[0] if len(bad) == 1 else ErrorList(bad[:MAX_REPORTED_ERRORS])
        all_bad += bad
    if not prompts:
        what = f"--prompt-data-path {' '.join(paths)} has no prompt"
        raise DataError(what, "there is nothing to complete", "check how it was made", code="data-file-empty")
    fingerprint = _fingerprint(prompts, tuple(teachers), wanted is not None, with_fields)
    return PromptSet(prompts, len(all_bad), fingerprint, [one.entry for one in all_bad])


def _fingerprint(
    prompts: Sequence[Prompt], teachers: Sequence[str], with_tags: bool, with_fields: bool
) -> str:
    """Return the SHA-256 of all that a run reads of the prompts."""
    digest = hashlib.sha256()
    for one in prompts:
        for ids in (one.ids, *(one.of_teachers.get(name, NOTHING) for name in teachers)):
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        if with_tags:
            digest.update(one.tag.encode() + b"\n")
        if with_fields:
            digest.update(json.dumps(one.fields, sort_keys=True, default=str).encode() + b"\n")
    return "sha256:" + digest.hexdigest()


def _files(paths: Sequence[str], file_tags: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each file of prompts with the tag of the path that names it, "" without one."""
    for path in paths:
        for file in all_local([path], "--prompt-data-path"):
            yield file, file_tags.get(path, "")


def _tag(wanted: WantedRecords, fields: Mapping[str, Any], file_tag: str) -> str:
    tag = wanted.read_tag(fields) or file_tag
    if not tag:
        what, why = "the prompt has no tag", "its tag chooses the teachers of the completion"
        do = "give the records a tag (--tag-key), or the file one: --data-tags PATH=TAG"
        raise DataError(what, why, do, code="record-value-not-valid")
    return tag


def parse_prompt(row: Row, contexts: Sequence[str] = ()) -> tuple[str | Conversation, dict[str, Any]]:
    """Return (text or conversation to complete, the other fields) of a raw record.

    Messages, also as `prompt` or `conversations`, may have `system`, `tools` and `chat_template_kwargs`
    beside them. Assistant messages at the end are left out. `contexts` are the keys that teachers read.
    Raises DataError.
    """
    fields = raw_fields(row)
    given = [key for key in KEYS if fields.get(key) is not None]
    if len(given) != 1:
        what = f"the record has {' and '.join(given) or 'none of ' + ', '.join(KEYS)}"
        why = "one of them is the text to complete"
        raise DataError(what, why, "keep exactly one of them", code="record-incomplete")
    (key,) = given
    others = {name: value for name, value in fields.items() if name != key}
    refuse_in_prompt(fields, key, contexts)
    if key == "prompt" and not isinstance(fields[key], list):
        check_string(fields[key], key)
        check_size(PROMPT_COMPLETION, (fields[key],))
        return fields[key], others
    reader = ConversationReader(fields, is_table=not isinstance(row, bytes))
    conversation, images = reader.of_messages(fields[key])
    check_size(MESSAGES, (conversation,))
    if images:
        raise DataError(
            f"the prompt has {counted(len(images), 'image')}, and completions are sampled after text alone",
            "the sampler fills its cache from token ids, and packs of completions carry no pictures",
            "remove the record; answers that are stored may have images (docs/vision.md)",
            code="images-not-read",
        )
    last = max((i for i, one in enumerate(conversation.messages) if one["role"] != ASSISTANT), default=-1)
    if last < 0:
        what = "all messages are the assistant's"
        raise DataError(what, "there is nothing to answer", "give a user's message", code="record-incomplete")
    return conversation.beginning(last + 1), others


def _log_ignored(
    path: str,
    parsed: Sequence[tuple[str | Conversation, Mapping[str, Any]]],
    tokenizer: Tokenizer,
    all_used: bool,
    used: Sequence[str],  # keys that the run reads
) -> None:
    """Log which keys of a file's records are not read. A reward function gets all of them (`all_used`)."""
    found = IgnoredKeys()
    for first in range(0, len(parsed), RECORDS_PER_TRIAL):
        records = []
        for prompt, others in parsed[first : first + RECORDS_PER_TRIAL]:
            of_kind = MESSAGE_KEYS if isinstance(prompt, Conversation) else ()
            read = others if all_used else (*of_kind, *used)
            ignored = tuple(key for key, value in others.items() if value is not None and key not in read)
            records.append(Record(MESSAGES, (prompt,), ignored=ignored))
        found.add(ignored_keys(records, tokenizer))
    texts = [prompt for prompt, _ in parsed[:LOOKED_AT] if isinstance(prompt, str)]
    for note in (str(found), control_token_note(texts, tokenizer)):
        if note:
            LOG.info(f"{path}: {note}")


def _check_ids(ids: np.ndarray, longest: int, vocab_size: int) -> None:
    if not len(ids):
        raise DataError(
            "the prompt is empty", "there is nothing to complete", "remove it", code="record-empty"
        )
    if len(ids) > longest:
        what = f"the prompt has {len(ids)} tokens, more than {longest}"
        why = "a prompt and --max-new-tokens must fit --seq-length"
        do = "shorten or remove it, raise --seq-length or lower --max-new-tokens"
        raise DataError(what, why, do, code="longer-than-seq-length")
    if ids.max() >= vocab_size:
        what = f"the prompt has id {ids.max()}, the models know {vocab_size}"
        do = "use the tokenizer of the models (--tokenizer-model)"
        raise DataError(what, "some model has no embedding for it", do, code="token-beyond-vocabulary")


def first_prompts(
    path: str, tokenizers: Sequence[Tokenizer], count: int, contexts: Sequence[str] = ()
) -> Iterator[DataError]:
    """Yield an error if none of the first `count` records of `path` is a prompt in all `tokenizers`.

    `contexts` are the keys of records that teachers read.
    """
    refused = None
    path = named_files(path, "--prompt-data-path").at_hand()[0]
    for place, (number, row) in enumerate(read_rows(path, whole=True)):
        try:
            prompt, _ = parse_prompt(row, contexts)
            for tokenizer in tokenizers:
                encode_prompt(prompt, tokenizer)
            return
        except DataError as error:
            refused = refused or error.located(f"--prompt-data-path {path}:{number}")
        if place + 1 >= count:
            break
    what = f"--prompt-data-path {Path(path)} is empty"
    yield refused or DataError(what, "", "check how it was made", code="data-file-empty")
