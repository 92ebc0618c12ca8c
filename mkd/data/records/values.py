"""Values of a record's keys: their JSON names, texts that tokenizers accept, JSON written as text."""

from __future__ import annotations

import json
from typing import Any

from mkd.errors import DataError


def json_name(value: Any) -> str:
    """Return the JSON name of the type of `value`."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def check_string(value: Any, name: str) -> None:
    """Raise DataError, which calls it `name`, unless `value` is a text that tokenizers accept."""
    if not isinstance(value, str):
        raise DataError(
            f"{name} is {'missing or null' if value is None else 'a ' + json_name(value)}",
            "it must be a string",
            'write "" if an empty text is meant, or remove the record'
            if value is None
            else "repair or remove the record",
            code="record-field-not-text",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a surrogate pair at character {error.start + 1}",
            "it is not valid text, and tokenizers refuse it",
            "repair or remove the record",
            code="record-text-damaged",
        ) from error
    if "\0" in value:
        raise DataError(
            f"{name} has a NUL at character {value.index(chr(0)) + 1}",
            "texts do not contain NUL; a broken copy or a full disk leaves it",
            "repair or remove the record",
            code="record-text-damaged",
        )


def from_json(value: Any, name: str, *kinds: type) -> Any:
    """Return a value of one of the `kinds`, which may be written as JSON in a text, as Arrow needs.

    Raises DataError, which calls it `name`, for anything else.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = value
    if isinstance(found, kinds) and not isinstance(found, bool):
        return found
    wanted = " or ".join(f"a {json_name(kind())}" for kind in kinds)
    raise DataError(
        f"{name} is a {json_name(value)}",
        f"it must be {wanted}, or its JSON as a text",
        "repair or remove the record",
        code="record-value-not-valid",
    )


def without_nulls(value: Any) -> Any:
    """Return the value without the keys that are null, at any depth.

    All rows of a table have the same keys. Those that a row does not need are null in it.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
