"""Files of held-out tasks: one JSON object a line (`.jsonl`, `.json`, or the same with `.gz`)."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mkd.data.records.ignored_keys import IgnoredKeys
from mkd.data.records.messages import read_messages
from mkd.errors import DataError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
COMPLETION_KEYS = (("prompt", "completion"), ("prompt", "canonical_solution"), ("text", "code"))
"""The keys of mkd, HumanEval and MBPP."""
QUESTION_KEYS = ("question", "choices", "answer", "subject", "images")
LOG = logging.getLogger("mkd")

Images = tuple[str | Mapping[str, Any], ...]
"""Images of a record as `messages.read_messages` returns them: paths, data URIs or structs."""


@dataclass(frozen=True)
class Question:
    """One multiple-choice question."""

    question: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice
    subject: str | None
    line: int  # line in its file, from 1
    images: Images = ()  # shown before the question


@dataclass(frozen=True)
class Completion:
    """A text and its continuation."""

    prompt: str  # may be empty
    completion: str
    line: int  # line in its file, from 1
    images: Images = ()  # shown before the prompt


Record = TypeVar("Record", Question, Completion)


def task_name(path: str | Path) -> str:
    """Return the file's name without its suffix. Raises DataError for an unknown kind of file."""
    name = Path(path).name
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)
    if suffix is None:
        what = f"{path} is not a known kind of file"
        why = "tasks are lines of JSON"
        raise DataError(what, why, f"use one of {', '.join(SUFFIXES)}", code="data-file-kind-unknown")
    return name.removesuffix(suffix)


def read_questions(path: str | Path) -> list[Question]:
    """Return the multiple-choice questions of a file. Raises DataError with file and line."""
    return _read(path, _question)


def read_completions(path: str | Path) -> list[Completion]:
    """Return the prompts and completions of a file. Raises DataError with file and line."""
    return _read(path, _completion)


def _read(path: str | Path, parse: Callable[[Mapping[str, Any], int], Record]) -> list[Record]:
    task_name(path)
    records, ignored = [], IgnoredKeys()
    try:
        for number, line in _lines(Path(path)):
            try:
                fields = _json_object(line)
                records.append(parse(fields, number))
                unread = fields.keys() - (QUESTION_KEYS if parse is _question else _completion_keys(fields))
                ignored.records.update(key for key in unread if fields[key] is not None)
            except DataError as error:
                raise error.located(f"{path}, line {number}") from error
    except (OSError, EOFError) as error:
        do = "check that it is there, complete and readable"
        raise DataError(f"{path} cannot be read", str(error), do, code="data-file-unreadable") from error
    if not records:
        do = "remove the path, or repair the file"
        raise DataError(f"{path} has no records", "there is nothing to evaluate", do, code="data-file-empty")
    if str(ignored):
        LOG.info(f"{path}: {ignored}")
    return records


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, content) of the lines that are not blank."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _json_object(line: bytes) -> Mapping:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        what = f"not valid JSON: {error}"
        why = "every line is one JSON object"
        raise DataError(what, why, "repair or remove the line", code="record-not-json") from error
    if not isinstance(value, dict):
        what = "not a JSON object"
        why = "every line is one JSON object"
        raise DataError(what, why, "make lines of an array with: jq -c '.[]'", code="record-not-json")
    return value


def _question(record: Mapping, line: int) -> Question:
    form = (
        'a record is {"question": text, "choices": [text, ...], "answer": index or letter}, and may have '
        'a "subject"'
    )
    question, choices, subject = record.get("question"), record.get("choices"), record.get("subject")
    if not _is_text(question):
        what = "question is missing, empty or not a text"
        raise DataError(what, form, "repair or remove the record", code="record-field-not-text")
    if (
        not isinstance(choices, list)
        or not 2 <= len(choices) <= len(LETTERS)
        or not all(map(_is_text, choices))
    ):
        what = f"choices is not a list of 2 to {len(LETTERS)} texts"
        raise DataError(what, form, "repair or remove the record", code="record-value-not-valid")
    if subject is not None and not _is_text(subject):
        what = "subject is empty or not a text"
        raise DataError(what, form, "repair or remove it", code="record-field-not-text")
    answer = _answer(record.get("answer"), len(choices))
    options = tuple(choice.strip() for choice in choices)
    return Question(question.strip(), options, answer, subject, line, _images(record))


def _answer(answer, num_choices: int) -> int:
    letters = LETTERS[:num_choices]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return letters.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < num_choices:
        return answer
    what = f"answer is {json.dumps(answer)}"
    last = num_choices - 1, letters[-1]
    why = f"of {num_choices} choices it is an index from 0 to {last[0]} or a letter from A to {last[1]}"
    raise DataError(what, why, "repair or remove the record", code="record-value-not-valid")


def _completion_keys(record: Mapping) -> tuple[str, ...]:
    """Return the keys of a prompt and its completion, if the record has them, and of its images."""
    return (*next((keys for keys in COMPLETION_KEYS if all(key in record for key in keys)), ()), "images")


def _completion(record: Mapping, line: int) -> Completion:
    keys = _completion_keys(record)[:2]
    if len(keys) < 2:
        forms = ", ".join("{" + ", ".join(f'"{key}"' for key in keys) + "}" for keys in COMPLETION_KEYS)
        found = ", ".join(list(record)[:8]) or "none"
        what = f"no known keys (found: {found})"
        why = f"a record has the keys of one of {forms}"
        raise DataError(what, why, "rename its keys", code="record-without-known-keys")
    prompt, completion = (record[key] for key in keys)
    if not (isinstance(prompt, str) and _encodes(prompt)):
        what = f"{keys[0]} is not a text"
        why = "the completion follows it"
        raise DataError(what, why, "repair or remove the record", code="record-field-not-text")
    if not _is_text(completion):
        what = f"{keys[1]} is empty or not a text"
        why = "there is nothing to score"
        raise DataError(what, why, "repair or remove the record", code="record-field-not-text")
    images = _images(record)
    if images:
        completion = completion.strip()  # as it stands in a conversation
    # The text of MBPP is a sentence, not the beginning of code.
    return Completion(prompt + "\n" if keys[0] == "text" else prompt, completion, line, images)


def _images(record: Mapping[str, Any]) -> Images:
    """Return the images of a record. Raises DataError for a list or an image that is not valid."""
    images = record.get("images")
    if images is None:
        return ()
    parts = [{"type": "image"} for _ in images] if isinstance(images, list) else []
    content = [*parts, {"type": "text", "text": ""}]
    return read_messages([{"role": "user", "content": content}], images)[1]


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _encodes(value)


def _encodes(text: str) -> bool:
    """Return True if `text` can be encoded: JSON may hold half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
