"""Turns of templates without marks: found with all their closing tokens, or refused."""

from __future__ import annotations

import json

import pytest

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ChatSettings, Conversation
from mkd.tokenizers.load import load_tokenizer
from tests.reported import refused
from tests.tokenizers.chat_templates import (
    CHATML_CONTROLS,
    CHATML_TOOLS,
    CONTROLS,
    DROPS_CALLS,
    HEADERS,
    INLINE,
    NO_PROMPT,
    ONE_CALL,
    OPEN_CALL,
    PLAIN,
    RENAMED,
    REPEATED,
    REWRITES_HISTORY,
    ROUNDS,
    THINK,
    TOOLS,
    TWO_CALLS,
    TWO_ENDS,
    said,
    user,
)
from tests.tokenizers.trained import train_hf_tokenizer


@pytest.fixture(scope="session")
def with_template(tmp_path_factory):
    """Return a function: (template, settings) -> (transformers' tokenizer, mkd's) from a model's folder."""
    built = {}

    def open_with(template, chat=None):
        if template not in built:
            folder = tmp_path_factory.mktemp("model")
            hf = train_hf_tokenizer(template, CONTROLS.get(template, CHATML_CONTROLS), vocab_size=400)
            hf.save_pretrained(folder)
            stops = [hf.eos_token_id, *hf.convert_tokens_to_ids(["<|eom|>"] if template is HEADERS else [])]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
            built[template] = hf, str(folder)
        hf, folder = built[template]
        return hf, load_tokenizer("HuggingFaceTokenizer", folder, chat)

    return open_with


def parts_with_loss(hf, tokenizer, conversation):
    """Return the texts with loss; check that the ids are those of transformers."""
    ids, mask = tokenizer.apply_chat_template(conversation)
    variables = {"tools": conversation.tools, **conversation.template_kwargs}
    assert ids == hf.apply_chat_template(list(conversation.messages), **variables)["input_ids"]
    assert len(ids) == len(mask)
    parts, previous = [], 0
    for token, counts in zip(ids, mask, strict=True):
        if counts:
            parts = parts if previous else [*parts, []]
            parts[-1].append(token)
        previous = counts
    return [tokenizer.decode(part) for part in parts]


def called(*arguments, end="<|im_end|>"):
    calls = (f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in arguments)
    return "".join(calls) + end


CHATML_ROUNDS = ["I add." + called(2), called(5), "5, 11.<|im_end|>", "Bye.<|im_end|>"]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
CASES = [
    (CHATML_TOOLS, PLAIN, None, ["Hi there.<|im_end|>", "4.<|im_end|>"]),
    (CHATML_TOOLS, REPEATED, None, ["yes<|im_end|>"] * 2),
    (CHATML_TOOLS, ONE_CALL, TOOLS, [called(2), "It is 5.<|im_end|>"]),
    (CHATML_TOOLS, ROUNDS, TOOLS, CHATML_ROUNDS),
    (CHATML_TOOLS, TWO_CALLS, TOOLS, [called(2, 5), "5 and 11.<|im_end|>"]),
    (REWRITES_HISTORY, PLAIN, None, ["Hi there.<|im_end|>", EMPTY_THOUGHT + "4.<|im_end|>"]),
    (REWRITES_HISTORY, THINK, None, ["Hi.<|im_end|>", "<think>\nEasy.\n</think>\n\n4.<|im_end|>"]),
    (REWRITES_HISTORY, ROUNDS, TOOLS, [*CHATML_ROUNDS[:3], EMPTY_THOUGHT + "Bye.<|im_end|>"]),
    (HEADERS, PLAIN, None, ["Hi there.<|eot|>", "4.<|eot|>"]),
    (HEADERS, INLINE, None, [INLINE[1]["content"] + "<|eot|>", INLINE[3]["content"] + "<|eot|>"]),
    (HEADERS, ONE_CALL, TOOLS, ['{"name": "add", "arguments": {"a": 2}}<|eom|>', "It is 5.<|eot|>"]),
    (RENAMED, PLAIN, None, ["Hi there.<end>", "4.<end>"]),
    (RENAMED, REPEATED, None, ["yes<end>", "yes<end>"]),
    (NO_PROMPT, PLAIN, None, [" Hi there.</s>", " 4.</s>"]),
    (TWO_ENDS, PLAIN, None, ["<answer>Hi there.</answer><end>", "<answer>4.</answer><end>"]),
    (TWO_ENDS, REPEATED, None, ["<answer>yes</answer><end>"] * 2),
]


@pytest.mark.parametrize(("template", "messages", "tools", "expected"), CASES)
def test_turns_reach_from_the_prompt_through_all_tokens_that_close_them(
    template, messages, tools, expected, with_template
):
    hf, tokenizer = with_template(template)
    assert parts_with_loss(hf, tokenizer, Conversation(messages, tools)) == expected


def test_a_call_of_a_template_without_prompt_starts_behind_the_message_before(with_template):
    hf, tokenizer = with_template(NO_PROMPT)
    found = parts_with_loss(hf, tokenizer, Conversation(ROUNDS[:3] + PLAIN[1:2], TOOLS))
    assert [part.split()[0] for part in found] == ["[CALLS]", "Hi"]
    assert all(part.endswith("</s>") for part in found) and '"a": 2' in found[0]


@pytest.mark.parametrize(
    ("template", "conversation", "code"),
    [
        (OPEN_CALL, Conversation(ONE_CALL, TOOLS), "chat-turn-not-found"),
        (DROPS_CALLS, Conversation([user("a"), said("b", tool_calls=ONE_CALL[1]["tool_calls"])]), "call"),
        (
            DROPS_CALLS,
            Conversation(PLAIN, TOOLS),
            "chat-template-drops-tools: does not write the record's tools",
        ),
        (HEADERS, Conversation(TWO_CALLS, TOOLS), "chat-template-drops-tools: does not write its tool_calls"),
        (
            CHATML_TOOLS,
            Conversation(PLAIN, loss=[True, None, None, None]),
            "record-loss-flag-not-valid: is flagged to have loss",
        ),
    ],
)
def test_what_a_template_does_not_write_is_refused(template, conversation, code, with_template):
    code = "chat-template-drops-tools: does not write its tool_calls" if code == "call" else code
    for method in ("apply_chat_template", "encode_turns"):
        with refused(code, DataError):
            getattr(with_template(template)[1], method)(conversation)


@pytest.mark.parametrize(
    ("rule", "flags", "expected"),
    [
        ("turns", (), CHATML_ROUNDS),
        ("last", (), CHATML_ROUNDS[3:]),
        ("last", (None, True, *[None] * 6), [CHATML_ROUNDS[0], CHATML_ROUNDS[3]]),
        ("auto", (None, None, None, False, None, None, None, False), [CHATML_ROUNDS[0], CHATML_ROUNDS[2]]),
        ("last", (*[None] * 7, False), []),
    ],
)
def test_the_rule_and_the_flags_choose_among_the_turns(rule, flags, expected, with_template):
    hf, tokenizer = with_template(CHATML_TOOLS, ChatSettings(rule))
    conversation = Conversation(ROUNDS, TOOLS, loss=flags)
    assert parts_with_loss(hf, tokenizer, conversation) == expected
    chat = tokenizer.encode_turns(conversation)
    assert [chat.data[turn.start : turn.end].decode() for turn in chat.turns] == expected


def test_calls_after_the_last_question_have_loss_under_last(with_template):
    hf, tokenizer = with_template(CHATML_TOOLS, ChatSettings("last"))
    assert parts_with_loss(hf, tokenizer, Conversation([*PLAIN, *ONE_CALL], TOOLS)) == [
        called(2),
        "It is 5.<|im_end|>",
    ]


def test_a_call_without_content_has_an_empty_one_where_the_template_needs_it(with_template):
    """As the first template of Qwen3, which looks for reasoning in every content."""
    strict = CHATML_TOOLS.replace("(m['content'] or '')", "m['content'].split('</think>')[-1]")
    hf, tokenizer = with_template(strict)
    assert ONE_CALL[1]["content"] is None
    empty = Conversation([ONE_CALL[0], {**ONE_CALL[1], "content": ""}, *ONE_CALL[2:]], TOOLS)
    assert parts_with_loss(hf, tokenizer, empty) == [called(2), "It is 5.<|im_end|>"]
    found = tokenizer.apply_chat_template(Conversation(ONE_CALL, TOOLS))
    assert found == tokenizer.apply_chat_template(empty)


def test_variables_of_the_record_win_over_those_of_the_run(with_template):
    chat = ChatSettings(template_kwargs={"enable_thinking": False})
    hf, tokenizer = with_template(REWRITES_HISTORY, chat)
    ask, thinks = [user("2+2?")], {"enable_thinking": True}
    without = tokenizer.generation_prompt(Conversation(ask))
    expected = hf.apply_chat_template(ask, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    assert without == expected and hf.decode(without).endswith(EMPTY_THOUGHT)
    with_thought = tokenizer.generation_prompt(Conversation(ask, template_kwargs=thinks))
    assert hf.decode(with_thought).endswith("assistant\n")
    assert tokenizer.chat_fingerprint != with_template(REWRITES_HISTORY)[1].chat_fingerprint


def test_the_end_of_a_turn_is_the_token_at_which_generation_stops(with_template):
    for template, closing in ((TWO_ENDS, "<end>"), (HEADERS, "<|eot|>"), (RENAMED, "<end>")):
        tokenizer = with_template(template)[1]
        assert tokenizer.roles["end_of_turn"] == tokenizer.vocabulary[closing]
