"""Messages as ShareGPT, axolotl, LLaMA-Factory and ms-swift write them, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mkd.data.records.tool_calls import Clean, read_call, read_tool_calls
from mkd.data.records.values import check_string, json_name
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT

SPEAKERS = {"human": "user"} | dict.fromkeys(("gpt", "model", "bot", "chatgpt", "ai"), ASSISTANT)
"""Other names of roles, as `from` or as `role`."""
CALLERS = ("function_call", "tool_call")  # roles of an assistant's calls, which are its text, as JSON
RESULTS = {"observation": "tool", "tool_response": "tool", "function_response": "tool"}  # only in `from`
KNOWN_SPEAKERS = (*SPEAKERS, *CALLERS, *RESULTS, "user", ASSISTANT, "system", "developer", "tool")
ROLES = (*SPEAKERS, *CALLERS, "tool_response", "user", ASSISTANT, "system", "developer", "tool")
"""Names that `role` may have, in letters of any case."""


def in_openai_form(message: Mapping[str, Any], name: str, clean: Clean) -> dict[str, Any]:
    """Return the message with `role` and `content`. Raises DataError, which calls the message `name`.

    Both may be called `from` and `value`. A role may have one of the names above. OpenAI's older
    `function_call` becomes `tool_calls`.
    """
    found = dict(message)
    is_sharegpt = "from" in found and "role" not in found
    if is_sharegpt:
        found["role"] = _role(found.pop("from"), name)
        if "value" in found and found.get("content") is None:
            found["content"] = found.pop("value")
    role = found["role"] = in_lower_case(found.get("role"), ROLES)
    if role in CALLERS:
        calls = read_tool_calls(found.get("content"), f"{name} ({role})", clean)
        return {**found, "role": ASSISTANT, "content": None, "tool_calls": calls}
    if isinstance(role, str):
        found["role"] = SPEAKERS.get(role) or (is_sharegpt and RESULTS.get(role)) or role
        if role == "tool_response":
            found["role"] = "tool"  # of ms-swift, in either form
    call = found.pop("function_call", None)
    if call is not None and not found.get("tool_calls"):
        found["tool_calls"] = [read_call(call, f"{name}: function_call", clean)]
    return found


def with_system(messages: list[Any], system: Any) -> list[Any]:
    """Return the messages after the record's `system` text, if it has one.

    Raises DataError if the messages begin with a system message too.
    """
    if system is None or system == "":
        return messages
    check_string(system, "system")
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if in_lower_case(first.get("role", first.get("from")), ROLES) == "system":
        raise DataError(
            "the record has `system`, and its messages begin with a system message",
            "it is not clear which of them the model reads",
            "keep one of them",
            code="record-ambiguous",
        )
    return [{"role": "system", "content": system}, *messages]


def in_lower_case(role: Any, known: Collection[str]) -> Any:
    """Return a known role as mkd writes it: NeMo calls them User and Assistant. Others stay as they are."""
    lower = role.lower() if isinstance(role, str) else None
    return lower if lower in known else role


def _role(speaker: Any, name: str) -> str:
    speaker = in_lower_case(speaker, KNOWN_SPEAKERS)
    if speaker not in KNOWN_SPEAKERS:
        shown = repr(speaker) if isinstance(speaker, str) else f"a {json_name(speaker)}"
        raise DataError(
            f"{name}: `from` is {shown}",
            f"known are {', '.join(KNOWN_SPEAKERS)}",
            "use one of them, or write messages with `role` and `content`",
            code="record-value-not-valid",
        )
    return speaker
