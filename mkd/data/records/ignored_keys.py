"""Counts of what nothing reads, so that a run can name it: keys, and reasoning that a template leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mkd.data.records.kinds import PAIR, TEXT, Record
from mkd.data.records.tool_calls import DOCUMENTS
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation, reasoning_of
from mkd.tokenizers.tokenizer import Tokenizer

ALWAYS_READ = ("role", "content", "tool_calls")
VARIABLE = "chat_template_kwargs."
SHOWN_KEYS = 12
TRIED_RECORDS = 2  # of every batch, for every key of messages
OPENED, CLOSED = "<think>", "</think>"  # around reasoning in a content
MESSAGES, DROPPED, CHARACTERS = "messages", "dropped", "characters"
RECORDS, WITHOUT, UNANSWERED, ROLE = "records", "without loss", "unanswered", "role "


@dataclass
class IgnoredKeys:
    """Keys of records, and of messages, with how many have them. Counts of parts of a file can be added."""

    records: Counter[str] = field(default_factory=Counter)  # keys that nothing reads
    messages: Counter[str] = field(default_factory=Counter)  # keys that only a chat template may read
    variables: Counter[str] = field(default_factory=Counter)  # chat_template_kwargs.NAME, likewise
    read: set[str] = field(default_factory=set)  # messages' keys and variables that a template does read
    reasoning: Counter[str] = field(default_factory=Counter)  # counts of `dropped_reasoning`
    wanted: Counter[str] = field(default_factory=Counter)  # records' keys that the template has as variables
    without_loss: Counter[str] = field(default_factory=Counter)  # counts of `count_without_loss`

    def add(self, other: IgnoredKeys) -> None:
        self.records += other.records
        self.messages += other.messages
        self.variables += other.variables
        self.read |= other.read
        self.reasoning += other.reasoning
        self.wanted += other.wanted
        self.without_loss += other.without_loss

    def __str__(self) -> str:
        """Return a line for people; an empty one if every key is read."""
        messages, variables = (
            Counter({key: count for key, count in counts.items() if key not in self.read})
            for counts in (self.messages, self.variables)
        )
        of_records, of_messages = _listed(self.records + variables), _listed(messages)
        if of_records and of_messages:
            return f"ignored keys: {of_records}; of messages: {of_messages}{self._advice()}"
        return (of_records and f"ignored keys: {of_records}{self._advice()}") or (
            of_messages and f"ignored keys of messages: {of_messages}"
        )

    def _advice(self) -> str:
        names = sorted(self.wanted)
        moved = ", ".join(f'"{name}": ...' for name in names)
        to_set = f"To set {' and '.join(names)} in the chat template"
        return f'. {to_set}, write "chat_template_kwargs": {{{moved}}}' if names else ""


def ignored_keys(records: Sequence[Record], tokenizer: Tokenizer) -> IgnoredKeys:
    """Return the counts of records.

    A template reads a key of messages if the conversation is rendered in another way without it, and a
    variable if another value is. That is tried on the first records of every batch that have the key, so it
    does not depend on the worker.
    """
    found, tried = IgnoredKeys(), Counter[str]()
    for record in records:
        found.records.update(record.ignored)
        found.reasoning += dropped_reasoning(conversations_of(record), tokenizer)
        keys = Counter(key for message in _messages(record) for key in message if key not in ALWAYS_READ)
        variables = Counter(_variable(name) for one in _parts(record)[:1] for name in one.template_kwargs)
        found.wanted.update(tokenizer.chat_variables.intersection(record.ignored) if _parts(record) else ())
        found.messages += keys
        found.variables += variables
        for key in (*keys, *variables):
            if key not in found.read and tried[key] < TRIED_RECORDS:
                tried[key] += 1
                reads = _reads if key in keys else _reads_variable
                if any(reads(tokenizer, one, key) for one in conversations_of(record)):
                    found.read.add(key)
    return found


def _variable(name: str) -> str:
    return name if name == DOCUMENTS else VARIABLE + name


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = [f"and {len(ordered) - SHOWN_KEYS} more"] * (len(ordered) > SHOWN_KEYS)
    return ", ".join([*(f"{key} ({count:,})" for key, count in ordered[:SHOWN_KEYS]), *more])


def _parts(record: Record) -> list[Conversation]:
    return [value for value in record.values if isinstance(value, Conversation)]


def _messages(record: Record) -> Iterator[Mapping[str, object]]:
    return (message for part in _parts(record) for message in part.messages)


def conversations_of(record: Record) -> Iterable[Conversation]:
    """Return the conversations of a record, two for a pair; [] if it is none."""
    parts = _parts(record)
    return [parts[0].followed_by(one) for one in parts[1:]] if record.kind == PAIR and parts else parts


def _reads(tokenizer: Tokenizer, conversation: Conversation, key: str) -> bool:
    without = [{k: v for k, v in message.items() if k != key} for message in conversation.messages]
    if without == list(conversation.messages):
        return False
    return _differ(tokenizer, [conversation, replace(conversation, messages=without)])


def _reads_variable(tokenizer: Tokenizer, conversation: Conversation, key: str) -> bool:
    name = key.removeprefix(VARIABLE)
    others = {one: value for one, value in conversation.template_kwargs.items() if one != name}
    values = () if name == DOCUMENTS else (True, False)
    variables = (others, *({**others, name: one} for one in values), conversation.template_kwargs)
    return _differ(tokenizer, [replace(conversation, template_kwargs=one) for one in variables])


def _differ(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> bool:
    """Return True if the template renders the conversations in several ways, or refuses one."""
    try:
        return len({tokenizer.render(one) for one in conversations}) > 1
    except DataError:
        return True


def dropped_reasoning(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> Counter[str]:
    """Return the messages with reasoning, those whose reasoning is not written, and its characters."""
    found = Counter[str]()
    for conversation in conversations:
        thoughts = [thought for message in conversation.messages if (thought := _reasoning(message))]
        if not thoughts:
            continue
        try:
            text = tokenizer.render(conversation)
        except DataError:
            continue
        missing = [thought for thought in thoughts if thought not in text]
        found[MESSAGES] += len(thoughts)
        found[DROPPED] += len(missing)
        found[CHARACTERS] += sum(map(len, missing))
    return found


def count_without_loss(records: Iterable[tuple[Record, bool]]) -> Counter[str]:
    """Return the records, those without a token that has loss, and why. The flag says which have one.

    Plain texts do not count: they lack loss only where they are empty.
    """
    found = Counter[str]()
    for record, has_loss in records:
        if record.kind == TEXT:
            continue
        found[RECORDS] += 1
        if not has_loss:
            roles = {str(message.get("role")) for message in _messages(record)}
            found[WITHOUT] += 1
            found[UNANSWERED] += bool(roles) and ASSISTANT not in roles
            found.update(ROLE + role for role in roles if ASSISTANT not in roles)
    return found


def without_loss_note(counts: Mapping[str, int]) -> str:
    """Return a line for people; an empty one if all records have a token with loss."""
    if not counts.get(WITHOUT):
        return ""
    share = f"{counts[WITHOUT]:,} of {counts[RECORDS]:,} records"
    text = f"{share} have no token with loss, so nothing learns from them"
    if not counts.get(UNANSWERED):
        return text
    roles = sorted(key.removeprefix(ROLE) for key, count in counts.items() if key.startswith(ROLE) and count)
    shown = ", ".join(roles[:SHOWN_KEYS])
    return f"{text}; {counts[UNANSWERED]:,} have no message of the role {ASSISTANT} (their roles: {shown})"


def reasoning_note(counts: Mapping[str, int]) -> str:
    """Return a line for people; an empty one if all reasoning is written."""
    if not counts.get(DROPPED):
        return ""
    return (
        f"the chat template leaves out the reasoning of {counts[DROPPED]:,} of {counts[MESSAGES]:,} "
        f"assistant messages ({counts[CHARACTERS]:,} characters), so nothing learns it"
    )


def _reasoning(message: Mapping[str, object]) -> str:
    """Return the reasoning of an assistant message, from its key or before the answer in its content."""
    if message.get("role") != ASSISTANT:
        return ""
    _, named = reasoning_of(message)
    content = message.get("content")
    if named or not isinstance(content, str):
        return named.strip()
    return content.rpartition(CLOSED)[0].rpartition(OPENED)[2].strip()
