"""Counts of the keys that nothing reads, so that a run can name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mkd.data.records.dropped_reasoning import dropped_reasoning
from mkd.data.records.kinds import PAIR, Record
from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer

ALWAYS_READ = ("role", "content", "tool_calls")
SHOWN_KEYS = 12
TRIED_RECORDS = 2  # of every batch, for every key of messages


@dataclass
class IgnoredKeys:
    """Keys of records, and of messages, with how many have them. Counts of parts of a file can be added."""

    records: Counter[str] = field(default_factory=Counter)  # keys that nothing reads
    messages: Counter[str] = field(default_factory=Counter)  # keys that only a chat template may read
    read: set[str] = field(default_factory=set)  # those of messages that a template does read

    reasoning: Counter[str] = field(default_factory=Counter)  # counts of `dropped_reasoning`

    def add(self, other: IgnoredKeys) -> None:
        self.records += other.records
        self.messages += other.messages
        self.read |= other.read
        self.reasoning += other.reasoning

    def __str__(self) -> str:
        """Return a line for people; an empty one if every key is read."""
        messages = {key: count for key, count in self.messages.items() if key not in self.read}
        of_records, of_messages = _listed(self.records), _listed(messages)
        if of_records and of_messages:
            return f"ignored keys: {of_records}; of messages: {of_messages}"
        return (of_records and f"ignored keys: {of_records}") or (
            of_messages and f"ignored keys of messages: {of_messages}"
        )


def ignored_keys(records: Sequence[Record], tokenizer: Tokenizer) -> IgnoredKeys:
    """Return the counts of records.

    A template reads a key of messages if the conversation is rendered in another way without it. That is
    tried on the first records of every batch that have the key, so it does not depend on the worker.
    """
    found, tried = IgnoredKeys(), Counter[str]()
    for record in records:
        found.records.update(record.ignored)
        found.reasoning += dropped_reasoning(_conversations(record), tokenizer)
        keys = Counter(key for message in _messages(record) for key in message if key not in ALWAYS_READ)
        found.messages += keys
        for key in keys:
            if key not in found.read and tried[key] < TRIED_RECORDS:
                tried[key] += 1
                if any(_reads(tokenizer, one, key) for one in _conversations(record)):
                    found.read.add(key)
    return found


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = [f"and {len(ordered) - SHOWN_KEYS} more"] * (len(ordered) > SHOWN_KEYS)
    return ", ".join([*(f"{key} ({count:,})" for key, count in ordered[:SHOWN_KEYS]), *more])


def _parts(record: Record) -> list[Conversation]:
    return [value for value in record.values if isinstance(value, Conversation)]


def _messages(record: Record) -> Iterator[Mapping[str, object]]:
    return (message for part in _parts(record) for message in part.messages)


def _conversations(record: Record) -> Iterable[Conversation]:
    parts = _parts(record)
    return [parts[0].followed_by(answer) for answer in parts[1:]] if record.kind == PAIR else parts


def _reads(tokenizer: Tokenizer, conversation: Conversation, key: str) -> bool:
    without = [{k: v for k, v in message.items() if k != key} for message in conversation.messages]
    if without == list(conversation.messages):
        return False
    try:
        return tokenizer.render(conversation) != tokenizer.render(replace(conversation, messages=without))
    except DataError:
        return True  # the template insists on it
