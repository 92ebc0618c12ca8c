"""Arguments of tool calls in the form that a chat template reads: objects, or their JSON as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

ARGUMENT = {"city": "Paris"}
ARGUMENT_TEXT = '{"city":"Paris"}'


def _call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]


def argument_form(render: Callable[[Sequence[Message]], str]) -> str:
    """Return which arguments a template reads, "objects", "texts" or "both".

    `render` returns a rendered conversation, or "" if the template refuses it. A template that reads texts
    writes them as they are. Others write them as quoted strings, which no model was trained on, or refuse
    them.
    """
    if ARGUMENT_TEXT not in render(_call(ARGUMENT_TEXT)):
        return "objects"
    return "both" if "Paris" in render(_call(ARGUMENT)) else "texts"


def needs_content(render: Callable[[Sequence[Message]], str], form: str) -> bool:
    """Return True if a template refuses a call without content and takes it with an empty one.

    The first template of Qwen3 does. `form` is the `argument_form`.
    """
    question, call = (with_arguments(one, form) for one in _call(ARGUMENT))
    alone = {key: value for key, value in call.items() if key != "content"}
    return not render([question, alone]) and bool(render([question, call]))


def with_arguments(message: Message, form: str) -> Message:
    """Return the message with the arguments of its calls in the `form` that the template reads."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls or form == "both":
        return message
    return {**message, "tool_calls": [_shaped(call, form) for call in calls]}


def _shaped(call: Any, form: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if form == "objects" and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call  # the template says what is wrong
    elif form == "texts" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
