"""Reasoning of the assistant that a chat template does not write, counted for each file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation, reasoning_of
from mkd.tokenizers.tokenizer import Tokenizer

OPENED, CLOSED = "<think>", "</think>"  # around reasoning in a content
MESSAGES, DROPPED, CHARACTERS = "messages", "dropped", "characters"


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
