"""Check the messages of a conversation, and separate their images from their text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation

IMAGE_PARTS = {"image": ("image", "path", "url"), "image_url": ("image_url",)}
"""Type of an image part -> the keys that may hold the image."""
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # of a URL; "data:" is the only one that is read


def split_images(
    messages: Any, column: Any = None
) -> tuple[list[dict[str, Any]], tuple[str | Mapping[str, Any], ...]]:
    """Return (messages as a chat template takes them, the image of each image part in order).

    The content of a message is a text, or a list of text and image parts. A part `{"type": "image"}` without
    an image takes the next one of `column`, the record's `images`. An image is a path, a data URI, or a
    struct {bytes, path}. Contents without an image become a text. Raises DataError for anything else.
    """
    _check_list(messages)
    queue = _column(column)
    found: list[str | Mapping[str, Any]] = []
    plain = [_message(number, message, queue, found) for number, message in enumerate(messages, 1)]
    if queue:
        raise _count_differs(len(column), len(column) - len(queue))
    return plain, tuple(found)


def num_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the characters of all texts in the messages."""
    return sum(len(text) for message in messages for text in texts_of(message))


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield each text of a message; the texts of a list of parts are joined."""
    for value in message.values():
        if isinstance(value, (str, list)):
            yield "".join(_pieces(value))


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


def check_string(value: Any, name: str) -> None:
    """Raise DataError, which calls it `name`, unless `value` is a text that tokenizers accept."""
    if not isinstance(value, str):
        raise DataError(
            f"{name} is {'missing or null' if value is None else 'a ' + json_name(value)}",
            "it must be a string",
            "repair or remove the record",
            code="record-field-not-text",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a surrogate pair at character {error.start + 1}",
            "it is not valid text, and tokenizers refuse it",
            "repair or remove the record",
            code="record-surrogate",
        ) from error
    if "\0" in value:
        raise DataError(
            f"{name} has a NUL at character {value.index(chr(0)) + 1}",
            "texts do not contain NUL; a broken copy or a full disk leaves it",
            "repair or remove the record",
            code="record-nul",
        )


def pair_of_answers(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return a prompt with two answers: three texts, or three conversations.

    Raises DataError for other values, an empty prompt, and images.
    """
    given = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if prompt in ("", []):
        what, why = "the prompt is empty", "both answers are judged as answers to it"
        raise DataError(what, why, "repair or remove the record", code="pair-prompt-empty")
    if not any(isinstance(value, list) for value in given.values()):
        for name, value in given.items():
            check_string(value, name)
        return prompt, chosen, rejected
    if not all(isinstance(value, list) for value in given.values()):
        kinds = ", ".join(f"{name} is a {json_name(value)}" for name, value in given.items())
        why = "a pair is three texts, or three lists of messages"
        raise DataError(kinds, why, "write all of them in one form", code="pair-of-two-forms")
    split = [split_images(value) for value in given.values()]
    if any(images for _, images in split):
        what, why = "the pair has images", "mkd learns preferences from text only"
        raise DataError(what, why, "remove the record", code="pair-with-images")
    (first, _), (second, _), (third, _) = split
    return Conversation(first), Conversation(second), Conversation(third)


def json_name(value: Any) -> str:
    """Return the JSON name of the type of `value`."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _check_list(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"messages is {'an empty list' if messages == [] else 'a ' + json_name(messages)}",
            "a conversation is a list of at least one message",
            'use [{"role": "user", "content": "..."}, ...]',
            code="record-messages-not-list",
        )


def _message(
    number: int, message: Any, queue: list[Any], found: list[str | Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the message without its images, which are appended to `found`."""
    if not isinstance(message, dict):
        raise DataError(
            f"message {number} is a {json_name(message)}",
            "a message is an object with role and content",
            'use {"role": "user", "content": "..."}',
            code="record-message-not-object",
        )
    check_string(message.get("role"), f"message {number}: role")
    if message.get("tool_calls"):
        raise DataError(
            f"message {number} has tool_calls",
            "their tokens would have no loss, though the assistant wrote them",
            "write the call into the content, or the record as prompt and completion",
            code="record-tool-calls",
        )
    content, name = message.get("content"), f"message {number}: content"
    if not isinstance(content, list):
        check_string(content, name)
        return message
    parts = [_part(part, f"{name}, part {place}", queue, found) for place, part in enumerate(content, 1)]
    if all("text" in part for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _part(part: Any, name: str, queue: list[Any], found: list[str | Mapping[str, Any]]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        check_string(part.get("text"), f"{name}: text")
        return {"type": "text", "text": part["text"]}
    if kind not in IMAGE_PARTS:
        raise DataError(
            f"{name} is {'of type ' + repr(kind) if isinstance(part, dict) else 'a ' + json_name(part)}",
            "parts of a message are texts and images",
            'use {"type": "text", "text": "..."} and {"type": "image", "image": "PATH"}',
            code="record-part-unknown",
        )
    image = next((part[key] for key in IMAGE_PARTS[kind] if part.get(key) is not None), None)
    if kind == "image_url" and isinstance(image, dict):
        image = image.get("url")
    if image is None and queue:
        place, image = queue.pop(0)
        if part.get("index") not in (None, place):
            raise _out_of_order(name, part["index"], place)
    if image is None:
        raise DataError(
            f"{name} is an image without content",
            "neither the part nor the record's `images` has one for it",
            "add a path, a data URI or {bytes, path} as `image`, or to the list `images`",
            code="record-image-missing",
        )
    found.append(_checked(image, name))
    return {"type": "image"}


def _checked(image: Any, name: str) -> str | Mapping[str, Any]:
    """Return the image if its form is known. Whether it can be read is found out when it is."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
        return image
    path: Any = image.get("path") if isinstance(image, Mapping) else image
    check_string(path, f"{name}: image")
    if SCHEME.match(path) and not path[:5].lower() == "data:":
        raise DataError(
            f"{name} is the URL {path[:80]}",
            "mkd never fetches images over the network",
            "download the image, and name its path below --image-root",
            code="record-image-url",
        )
    return path


def _column(column: Any) -> list[Any]:
    if column is None:
        return []
    if not isinstance(column, list):
        raise DataError(
            f"images is a {json_name(column)}",
            "it is the list of a record's images, in the order of the image parts",
            "write a list, also for a single image",
            code="record-images-not-list",
        )
    return list(enumerate(column))


def _out_of_order(name: str, index: Any, place: int) -> DataError:
    return DataError(
        f"{name} has the index {index}, and the next of the record's images is number {place}",
        "images are taken in the order of their places in the conversation",
        "sort the list `images`, or put the images into the parts",
        code="record-images-out-of-order",
    )


def _count_differs(listed: int, used: int) -> DataError:
    return DataError(
        f"images lists {listed} images, and the messages have places for {used}",
        "each image needs its place in the conversation",
        'add a part {"type": "image"} to a message for each, or remove the others',
        code="record-images-unused",
    )
