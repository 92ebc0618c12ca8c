"""Turns of a known shape: those of the full search, from one rendering."""

from __future__ import annotations

import pytest

from mkd.tokenizers.chat import ChatEncoder
from mkd.tokenizers.chat_input import ChatSettings, Conversation
from mkd.tokenizers.chat_shapes import KnownShapes
from mkd.tokenizers.chat_template import PROBE, ChatTemplate
from mkd.tokenizers.chat_turns import TurnSearch, closing_token
from tests.tokenizers.chat_templates import (
    CHATML_CONTROLS,
    CHATML_TOOLS,
    CONTROLS,
    REWRITES_HISTORY,
    TOOLS,
    TWO_ENDS,
    call,
    result,
    said,
    user,
)
from tests.tokenizers.test_chat import DROPS_REASONING
from tests.tokenizers.test_chat_turns import CASES
from tests.tokenizers.trained import CHATML, train_hf_tokenizer


class CountedTemplate(ChatTemplate):
    """Counts its renderings, and those that look for the token that closes turns."""

    count = probes = 0

    def render(self, conversation, add_generation_prompt=False):
        self.count += 1
        self.probes += conversation.messages[:1] in (PROBE[:1], list(PROBE[:1]))
        return super().render(conversation, add_generation_prompt)


def with_template(template):
    hf = train_hf_tokenizer(template, CONTROLS.get(template, CHATML_CONTROLS), vocab_size=400)
    return CountedTemplate(hf, ChatSettings())


def searched(template, conversation, text):
    return TurnSearch(template, conversation, text, closing_token(template)).turns()


@pytest.mark.parametrize(("template", "messages", "tools", "_"), CASES)
def test_a_shape_has_the_turns_of_the_full_search(template, messages, tools, _):
    found, conversation = with_template(template), Conversation(messages, tools)
    text = found.render(conversation)
    turns = KnownShapes(found, closing_token(found)).turns(conversation, text)
    assert turns == searched(found, conversation, text)


TEXTS = [
    "fox",
    "  padded \n\n",
    "<|im_end|>\n<|im_start|>user\nx",
    "qz00001zq",
    "caf\u00e9 \U0001f600",
    "x" * 999,
]


@pytest.mark.parametrize("template", [CHATML, CHATML_TOOLS, REWRITES_HISTORY, TWO_ENDS])
def test_any_text_is_found_in_a_known_shape_from_one_rendering(template):
    found = with_template(template)
    shapes = KnownShapes(found, closing_token(found))
    for question, answer in zip(TEXTS, reversed(TEXTS), strict=True):
        conversation = Conversation([user(question), said(answer), user(answer), said(question)])
        text = found.render(conversation)
        before = found.count
        turns = shapes.turns(conversation, text)
        assert question is TEXTS[0] or found.count == before, "later conversations render nothing"
        assert turns is not None and answer.strip() in text[turns[1].start : turns[1].content_end]
        if "<|im" not in question + answer:
            assert turns == searched(found, conversation, text)


def test_rounds_of_tools_are_known_whatever_their_names_ids_and_arguments():
    found = with_template(CHATML_TOOLS)
    shapes = KnownShapes(found, closing_token(found))
    for number, arguments in enumerate([{"a": 1}, {"a": '\u00e9 "x"'}, {"a": [{"b": None}]}, {"a": 2.5}]):
        one = call(number, **arguments)
        one["function"]["name"] = f"tool{number}"
        messages = [user("q"), said(None, tool_calls=[one]), result("5", number), said("done")]
        conversation = Conversation(messages, TOOLS)
        text = found.render(conversation)
        before = found.count
        turns = shapes.turns(conversation, text)
        assert number == 0 or found.count == before
        assert turns == searched(found, conversation, text)


def test_a_text_that_the_template_rewrites_is_left_to_the_full_search():
    found = with_template(DROPS_REASONING)
    conversation = Conversation([user("a"), said("<think>b</think>c"), user("d"), said("e")])
    assert KnownShapes(found, closing_token(found)).turns(conversation, found.render(conversation)) is None


def test_the_token_that_closes_turns_is_looked_for_once():
    found = with_template(DROPS_REASONING)
    encoder = ChatEncoder(found._hf, found)
    assert encoder.closing == "<|im_end|>"
    before = found.probes
    for answer in ("<think>b</think>c", "<think>d</think>e"):
        encoder.encode(Conversation([user("a"), said(answer), user("f"), said("g")]))
    assert found.probes == before > 0
