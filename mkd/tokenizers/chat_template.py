"""A tokenizer's chat template: conversations to text, and the parts of the text that it marks.

Templates read the arguments of tool calls as objects, or as their JSON in text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from mkd.errors import DataError
from mkd.tokenizers.chat_input import PROBE, ChatSettings, Conversation, check_template_kwargs, reasoning_of
from mkd.tokenizers.tokenizer_files import model_file

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
DATE = "strftime_now"  # the function of transformers that gives templates the present date
DATE_CALL = re.compile(DATE + r"""\(\s*("[^"\\]*"|'[^'\\]*')\s*\)""")

Message = Mapping[str, Any]

ARGUMENT = {"city": "Paris"}  # of a call that asks a template which form it reads
ARGUMENT_TEXT = '{"city":"Paris"}'


class ChatTemplate:
    """The chat template of a fast transformers tokenizer, with the settings of a run."""

    def __init__(self, hf: Any, settings: ChatSettings) -> None:
        self._hf, self.settings = hf, settings

    @property
    def origin(self) -> str:
        """Words behind "the chat template" in errors: " of" its folder or hub id; "" if made in memory."""
        return f" of {self._hf.name_or_path}" if self._hf.name_or_path else ""

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """Strings of the added tokens, longest first."""
        strings = {token.content for token in self._hf.added_tokens_decoder.values()}
        return tuple(sorted(strings, key=lambda one: (-len(one), one)))

    @cached_property
    def stops(self) -> frozenset[str]:
        """Strings of the tokens that end a completion, as far as the tokenizer names them."""
        ids = {self._hf.eos_token_id, *self._listed_stops()} - {None}
        strings = (token for i, token in self._hf.added_tokens_decoder.items() if i in ids)
        return frozenset(token.content for token in strings)

    @cached_property
    def reads_parts_only(self) -> bool:
        """True if the template drops contents that are texts, as those of vision-language models may."""
        question = PROBE[0]["content"]
        if question in self._rendered_or_empty(PROBE):
            return False
        return question in self._rendered_or_empty(with_parts(PROBE))

    @cached_property
    def writes_date(self) -> bool:
        """True if a template of the tokenizer may write the date of the day on which it is rendered."""
        found = self._hf.chat_template
        return any(DATE in one for one in (found.values() if isinstance(found, dict) else [found]))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that a template of the tokenizer reads and does not set itself; none if it is not valid."""
        found = self._hf.chat_template
        try:
            parsed = [
                (environment, environment.parse(one))
                for one in (found.values() if isinstance(found, dict) else [found])
                for environment in [_compile_jinja_template(one).environment]
            ]
        except TemplateError:
            return frozenset()
        names = [find_undeclared_variables(tree) - environment.globals.keys() for environment, tree in parsed]
        return frozenset().union(*names)

    @property
    def fingerprint(self) -> list[Any]:
        """All that decides the ids and losses besides tokenizer and template; empty at the defaults."""
        settings = self.settings
        date = settings.date if self.writes_date else None
        found = [settings.loss, dict(settings.template_kwargs), date]
        found = [] if found == ["auto", {}, None] else found
        more_stops = sorted(self.stops - {self._hf.eos_token})
        return [*found, more_stops] if more_stops else found

    def has_marks(self, conversation: Conversation) -> bool:
        """Return True if the template has {% generation %} marks."""
        return GENERATION_MARK.search(self.source(conversation)) is not None

    def source(self, conversation: Conversation) -> str:
        """Return the text of the template for the conversation, with the date of the run in it."""
        source = self._hf.get_chat_template(tools=conversation.tools)
        return with_date(source, self.settings.date)

    def describe(self) -> str:
        """Return a line for people: which messages have loss."""
        rule = self.settings.loss
        has_marks = GENERATION_MARK.search(self.source(Conversation(PROBE))) is not None
        loss = {
            "auto": "what the chat template marks with {% generation %}; in records where it marks nothing, "
            "every turn of the assistant"
            if has_marks
            else "every turn of the assistant, because the chat template marks none",
            "turns": "every turn of the assistant" + (", whatever the template marks" if has_marks else ""),
            "marks": "what the chat template marks with {% generation %}",
            "last": "the assistant's messages after the last user message",
        }[rule]
        return f"conversations have loss on {loss} (--chat-loss {rule})"

    def describe_date(self) -> list[str]:
        """Return a line for people on the date that the template writes, if it writes one."""
        if not self.writes_date:
            return []
        date = self.settings.date
        if date is None or DATE + "(" in self.source(Conversation(PROBE)):
            return ["note: the chat template writes the present date, so its token ids change every day"]
        return [
            f"note: the chat template writes a date. The whole run writes {date}, also after a resume; "
            "--chat-date sets another date"
        ]

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the text of the conversation. Raises DataError if the template refuses it."""
        try:
            return self._hf.apply_chat_template(
                self._shaped(conversation.messages),
                chat_template=self.source(conversation),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._variables(conversation),
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise self._refuses(error) from error

    def prompt(self, conversation: Conversation) -> str | None:
        """Return the text up to the next turn's beginning; None if the template has no prompt, or refuses."""
        if not conversation.messages:
            return None
        try:
            prompt = self.render(conversation, add_generation_prompt=True)
            return None if prompt == self.render(conversation) else prompt
        except DataError:
            return None

    def marks(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Return the places of the template's {% generation %} blocks in the rendered text, in characters."""
        try:
            _, (found,) = render_jinja_template(
                conversations=[self._shaped(conversation.messages)],
                chat_template=self.source(conversation),
                return_assistant_tokens_mask=True,
                **{**self._hf.special_tokens_map, **self._variables(conversation)},
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise self._refuses(error) from error
        return [(start, end) for start, end in found if start < end]

    def _listed_stops(self) -> Sequence[Any]:
        """Return `eos_token_id` of the generation_config.json beside the tokenizer, if it is there."""
        model = self._hf.name_or_path
        try:
            path = model_file(model, "generation_config.json") if model else None
            listed = json.loads(Path(path).read_text(encoding="utf-8")).get("eos_token_id") if path else []
        except (OSError, ValueError, AttributeError):
            return ()  # whoever generates with it says what is wrong
        return listed if isinstance(listed, list) else [listed]

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        """Return what the template reads apart from the messages."""
        check_template_kwargs(conversation.template_kwargs)
        tools = None if conversation.tools is None else [dict(one) for one in conversation.tools]
        return {"tools": tools, **self.settings.template_kwargs, **conversation.template_kwargs}

    def _shaped(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template reads."""
        if self.reads_parts_only:
            messages = with_parts(messages)
        present = [{k: v for k, v in one.items() if v is not None} for one in messages]
        if any("content" not in one for one in present) and self._needs_content:
            present = [{"content": "", **one} for one in present]
        return [_with_reasoning(dict(with_arguments(one, self._arguments))) for one in present]

    def _refuses(self, error: Exception) -> DataError:
        return DataError(
            f"the chat template{self.origin} refuses the conversation: {error}",
            "it cannot become tokens in the way the model was trained on",
            "check the roles and their order against the template of the model",
            code="chat-template-refuses",
        )

    @cached_property
    def _arguments(self) -> str:
        return argument_form(self._rendered_or_empty)

    @cached_property
    def _needs_content(self) -> bool:
        return needs_content(self._rendered_or_empty, self._arguments)

    def _rendered_or_empty(self, messages: Sequence[Message]) -> str:
        try:
            return str(self._hf.apply_chat_template(list(messages), tokenize=False))
        except (TemplateError, TypeError, ValueError, KeyError):
            return ""


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with every content that is a text as a list of parts."""
    return [
        {**one, "content": text_part(one["content"])} if isinstance(one.get("content"), str) else one
        for one in messages
    ]


def text_part(text: str) -> list[dict[str, str]]:
    """Return a content that is a list of one text."""
    return [{"type": "text", "text": text}]


def with_date(source: str, date: str | None) -> str:
    """Return the text of a template with `date`, if given, in place of its calls for the present date."""
    if date is None:
        return source
    day = datetime.fromisoformat(date)
    return DATE_CALL.sub(lambda call: '"' + day.strftime(call[1][1:-1]).replace('"', "") + '"', source)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the keys that templates read, as transformers 5.23 does."""
    key, reasoning = reasoning_of(message)
    if not key:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


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
