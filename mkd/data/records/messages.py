"""Check the messages of a conversation, and separate their images and flags of loss from their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mkd.data.records.content_parts import ImageQueue
from mkd.data.records.loss_flags import LOSS_FLAGS, loss_flag
from mkd.data.records.sharegpt import in_openai_form, with_system
from mkd.data.records.tool_calls import cleaner, read_tool_calls
from mkd.data.records.values import check_string, from_json, json_name
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation

Images = tuple[str | Mapping[str, Any], ...]
"""Paths, data URIs, or structs {bytes, path}."""


def read_messages(
    messages: Any,
    images: Any = None,  # the record's list of images
    *,
    name: str = "",  # key of the messages, for errors, if the record has several lists of them
    system: Any = None,  # a text before the messages
    is_table: bool = False,  # a row of a table, whose keys may be null
) -> tuple[Conversation, Images]:
    """Return (conversation, the image of each image part in order).

    Messages are a list or its JSON text, in the form of OpenAI or ShareGPT. The content of a message is a
    text, or a list of text and image parts; beside `tool_calls` it may be null. A part `{"type": "image"}`
    without an image takes the next one of `images`. Contents without an image become a text. Raises DataError
    for anything else.
    """
    given = with_system(_list(messages, name), system)
    queue, clean = ImageQueue(images), cleaner(is_table)
    read, flags = [], []
    for number, message in enumerate(given, 1):
        where = f"{name}, message {number}" if name else f"message {number}"
        _check_object(message, where)
        named = in_openai_form(message, where, clean)
        check_string(named.get("role"), f"{where}: role")
        flags.append(loss_flag(named, where))
        read.append(_message(named, where, queue, is_table))
    queue.close()
    loss = flags if any(flag is not None for flag in flags) else ()
    return Conversation(read, loss=loss), tuple(queue.found)


def num_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the characters of all texts in the messages."""
    return sum(len(text) for message in messages for text in texts_of(message))


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield each text of a message; the texts of a list of parts are joined."""
    for key, value in message.items():
        yield from _strings(value) if key == "tool_calls" else ["".join(_pieces(value))]


def joined_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the contents joined, and all texts but the roles, as templates may join them.

    White space at the ends of the texts is left out.
    """
    contents = [message.get("content") for message in messages]
    values = [value for message in messages for name, value in message.items() if name != "role"]
    return ["".join(text.strip() for one in joined for text in _pieces(one)) for joined in (contents, values)]


def _pieces(value: Any) -> list[str]:
    """Return the texts in a value of a message."""
    parts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _list(messages: Any, name: str) -> list[Any]:
    is_text = isinstance(messages, str) and messages.lstrip().startswith("[")
    found = from_json(messages, name or "messages", list) if is_text else messages
    if not isinstance(found, list) or not found:
        raise DataError(
            f"{name or 'messages'} is {'an empty list' if found == [] else 'a ' + json_name(found)}",
            "a conversation is a list of at least one message, or its JSON as a text",
            'use [{"role": "user", "content": "..."}, ...]',
            code="record-value-not-valid",
        )
    return found


def _check_object(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(
            f"{where} is a {json_name(message)}",
            "a message is an object with role and content",
            'use {"role": "user", "content": "..."}',
            code="record-value-not-valid",
        )


def _message(named: Mapping[str, Any], where: str, queue: ImageQueue, is_table: bool) -> dict[str, Any]:
    """Return the message as a chat template takes it: without images, flags of loss and null keys."""
    message = {key: value for key, value in named.items() if value is not None and key not in LOSS_FLAGS}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    else:
        _check_caller(message["role"], where)
        calls = read_tool_calls(message["tool_calls"], f"{where}: tool_calls", cleaner(is_table))
        message["tool_calls"] = calls
    content = named.get("content")
    if content is None and "tool_calls" in message:
        return {**message, "content": None}
    if isinstance(content, list):
        return {**message, "content": queue.read(content, f"{where}: content")}
    check_string(content, f"{where}: content")
    return message


def _check_caller(role: str, where: str) -> None:
    if role != ASSISTANT:
        raise DataError(
            f"{where} has tool_calls, and the role {role}",
            "only the assistant calls tools",
            "repair or remove the record",
            code="record-value-not-valid",
        )
