"""Tools and documents of a record, calls of tools in its messages, and variables of the chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mkd.data.records.values import check_string, from_json, json_name, without_nulls
from mkd.errors import DataError

DOCUMENTS = "documents"  # texts that an answer is drawn from, which templates of RAG models write
Clean = Callable[[Any], Any]
"""Removes null keys from values of a table's rows; values of JSON stay as they are."""


def cleaner(is_table: bool) -> Clean:
    """Return what is done to tools, arguments and template variables of a record before they are read."""
    return without_nulls if is_table else lambda value: value


def read_tools(value: Any, clean: Clean) -> list[dict[str, Any]] | None:
    """Return the schemas of the tools, from a list or its JSON text. Raises DataError for anything else."""
    if value is None or value == "":
        return None
    tools = [from_json(tool, f"tools, number {n}", dict) for n, tool in enumerate(_list(value, "tools"), 1)]
    return clean(tools) or None


def read_template_kwargs(value: Any, clean: Clean) -> dict[str, Any]:
    """Return the template's variables of a record, from an object or its JSON text. Raises DataError."""
    return {} if value is None or value == "" else clean(from_json(value, "chat_template_kwargs", dict))


def are_documents(value: Any) -> bool:
    """Return True for documents as transformers takes them: a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def read_tool_calls(value: Any, name: str, clean: Clean) -> list[dict[str, Any]]:
    """Return the calls of a message, in OpenAI's form. Raises DataError, which calls the value `name`.

    The arguments of a call stay as they are given, an object or its JSON as text: the tokenizer gives them to
    the template in the form that this reads.
    """
    calls = _list(value, name)
    return [read_call(call, f"{name}, number {n}", clean) for n, call in enumerate(calls, 1)]


def read_call(value: Any, name: str, clean: Clean) -> dict[str, Any]:
    """Return a call: {"type", "function": {"name", "arguments"}}, from it or from its `function` alone."""
    call = clean(from_json(value, name, dict))
    if "function" not in call:
        call = {"type": "function", "function": call}
    function = dict(from_json(call["function"], f"{name}: function", dict))
    check_string(function.get("name"), f"{name}: name of the function")
    arguments = function.get("arguments", {})
    if arguments is None or arguments == "":
        arguments = {}
    from_json(arguments, f"{name}: arguments", dict)
    return {**call, "function": {**function, "arguments": arguments}}


def _list(value: Any, name: str) -> list[Any]:
    found = from_json(value, name, list, dict)
    if isinstance(found, list):
        return found
    if isinstance(value, str):
        return [found]  # a single one written as JSON
    raise DataError(
        f"{name} is a {json_name(value)}",
        "it must be a list, or its JSON as a text",
        "write a list, also for a single one",
        code="record-value-not-valid",
    )
