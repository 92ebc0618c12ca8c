"""Loss masks of conversations, for the known kinds of chat template."""

from __future__ import annotations

import pytest

from mkd.errors import DataError, UsageError
from mkd.tokenizers.chat_input import ChatSettings, Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import load_tokenizer
from tests.reported import refused
from tests.tokenizers.chat_templates import CHATML_TOOLS, MARKED, ROUNDS, TOOLS
from tests.tokenizers.test_chat_turns import CHATML_ROUNDS
from tests.tokenizers.trained import train_hf_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which fox?"},
    {"role": "assistant", "content": "The quick brown fox."},
    {"role": "user", "content": "And the dog?"},
    {"role": "assistant", "content": "Lazy."},
]
OPEN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# As Qwen3: reasoning of earlier turns is dropped, an empty one is written into the last turn.
DROPS_REASONING = (
    "{% for m in messages %}" + OPEN + "{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1] | trim %}"
    "{% if loop.last %}{{ '<think>\n' + (m['content'].split('</think>')[0] | replace('<think>', '') | trim"
    " if '</think>' in m['content'] else '') + '\n</think>\n\n' }}{% endif %}{{ answer }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
# As Phi-3: EOS at the very end, wherever that is.
EOS_AT_THE_END = (
    "{% for m in messages %}" + OPEN + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# As Llama 2: no marker before an answer, a blank before the end-of-turn token.
INSTRUCTION = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As reasoning models: prompts with more than a finished turn keeps.
PROMPTS_REASONING = (
    "{% for m in messages %}" + OPEN + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
# Every turn changes all others, so that only marks can tell.
COUNTS = "{% for m in messages %}" + OPEN + "{{ messages | map(attribute='content') | join | length }}"
COUNTS_UNMARKED = COUNTS + "{{ m['content'] | upper }}{{ '<|im_end|>\n' }}{% endfor %}"
COUNTS_MARKED = (
    COUNTS + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | upper }}{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def predicted_text(template, messages, chat=None, conversation=None):
    """Return the parts of the conversation with loss; check that the ids are those of the template."""
    hf = train_hf_tokenizer(template)
    tokenizer = HuggingFaceTokenizer(hf, chat)
    conversation = conversation or Conversation(messages)
    ids, mask = tokenizer.apply_chat_template(conversation)
    assert ids == hf.apply_chat_template(messages, tools=conversation.tools)["input_ids"]
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    parts, previous = [], 0
    for token, predicted in zip(ids, mask, strict=True):
        if predicted:
            parts = parts if previous else [*parts, []]
            parts[-1].append(token)
        previous = predicted
    return [tokenizer.decode(part) for part in parts]


def test_assistant_turns_with_their_end_of_turn_token(tokenizer):
    ids, mask = tokenizer.apply_chat_template(Conversation(CHAT))
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich fox?<|im_end|>")
    predicted = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert predicted == "The quick brown fox.<|im_end|>Lazy.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (EOS_AT_THE_END, ["The quick brown fox.<|im_end|>", "Lazy.<|im_end|>"]),
        (DROPS_REASONING, ["The quick brown fox.<|im_end|>", "<think>\n\n</think>\n\nLazy.<|im_end|>"]),
        (INSTRUCTION, [" The quick brown fox. <|endoftext|>", " Lazy. <|endoftext|>"]),
        (PROMPTS_REASONING, ["The quick brown fox.<|im_end|>", "Lazy.<|im_end|>"]),
        (PLAIN, ["The quick brown fox.", "Lazy."]),
        (COUNTS_MARKED, ["THE QUICK BROWN FOX.<|im_end|>", "LAZY.<|im_end|>"]),
    ],
    ids=[
        "eos at the end",
        "drops reasoning",
        "instruction",
        "prompts reasoning",
        "no control tokens",
        "marked",
    ],
)
def test_kinds_of_template(template, expected):
    assert predicted_text(template, CHAT) == expected


def test_reasoning_has_loss_where_the_template_keeps_it():
    messages = [
        *CHAT[1:2],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThe brown one."},
        *CHAT[3:4],
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nLazy."},
    ]
    expected = ["The brown one.<|im_end|>", "<think>\nwell\n</think>\n\nLazy.<|im_end|>"]
    assert predicted_text(DROPS_REASONING, messages) == expected


@pytest.mark.parametrize(
    "content", ["", "  padded \n\n", "caf\u00e9 \U0001f600", "assistantturn", "user", "Which fox?"]
)
def test_contents_that_could_confuse_the_search(content):
    messages = [
        {"role": "user", "content": content or "x"},
        {"role": "assistant", "content": content},
        *CHAT[3:],
    ]
    assert predicted_text(EOS_AT_THE_END, messages) == [content + "<|im_end|>", "Lazy.<|im_end|>"]


def test_assistant_first_and_twice_in_a_row():
    messages = [{"role": "assistant", "content": "Hello."}, CHAT[2], CHAT[3]]
    assert predicted_text(EOS_AT_THE_END, messages) == ["Hello.<|im_end|>", "The quick brown fox.<|im_end|>"]


def test_a_conversation_without_an_answer_has_no_loss():
    assert predicted_text(EOS_AT_THE_END, CHAT[:2]) == []


def test_template_that_hides_its_turns_is_refused():
    with refused("chat-turn-not-found", DataError) as caught:
        predicted_text(COUNTS_UNMARKED, CHAT)
    assert caught.value.what.startswith("message 3: ")


def test_template_that_refuses_a_conversation():
    with refused("chat-template-refuses", DataError):
        predicted_text("{{ raise_exception('no system role') }}", CHAT)


def test_tokenizer_without_template():
    with refused("chat-template-missing", DataError):
        predicted_text(None, CHAT)


def test_places_of_turns(tokenizer):
    chat = tokenizer.encode_turns(Conversation(CHAT))
    assert chat.encoded.ids.tolist() == tokenizer.apply_chat_template(Conversation(CHAT))[0]
    assert chat.data.decode() == tokenizer.decode(chat.encoded.ids.tolist())
    assert [turn.message for turn in chat.turns] == [2, 4]
    assert [chat.data[turn.start : turn.content_end] for turn in chat.turns] == [
        b"The quick brown fox.",
        b"Lazy.",
    ]
    assert {chat.data[turn.content_end : turn.end] for turn in chat.turns} == {b"<|im_end|>"}
    closing = chat.encoded.ids[chat.encoded.ends == chat.turns[0].end].tolist()
    assert closing == [tokenizer.vocabulary["<|im_end|>"]]


def in_folder(folder, template, chat=None):
    """Save the tokenizer into the folder, and open it."""
    train_hf_tokenizer(template).save_pretrained(folder)
    return load_tokenizer("HuggingFaceTokenizer", str(folder), chat)


@pytest.mark.parametrize("template", [COUNTS_UNMARKED, COUNTS_MARKED])
def test_turns_that_cannot_be_placed_are_refused_with_the_folder_of_the_template(template, tmp_path):
    """Marks help a corpus of one model. Alignment with another tokenizer needs the turns."""
    tokenizer = in_folder(tmp_path / "model", template)
    with refused("chat-turn-not-found", DataError) as caught:
        tokenizer.encode_turns(Conversation(CHAT))
    assert caught.value.what.startswith("message 3: ")
    assert f"template of {tmp_path}/model" in caught.value.what
    assert "{% generation" not in caught.value.why + caught.value.do
    if template == COUNTS_UNMARKED:
        with refused("chat-turn-not-found", DataError) as caught:
            tokenizer.apply_chat_template(Conversation(CHAT))
        assert f"template of {tmp_path}/model" in caught.value.what
        assert "add {% generation %} marks" in caught.value.do


THOUGHT = "<think></think>"  # the marks of MARKED hold it, and the line behind a turn
MARKED_ROUNDS = [f"{THOUGHT}{part}\n" for part in CHATML_ROUNDS]


@pytest.mark.parametrize(
    ("rule", "flags", "expected"),
    [
        ("auto", (), MARKED_ROUNDS),
        ("marks", (), MARKED_ROUNDS),
        ("turns", (), CHATML_ROUNDS),
        ("last", (), MARKED_ROUNDS[3:]),
        ("auto", (None, False, *[None] * 6), MARKED_ROUNDS[1:]),
        ("last", (*[None] * 5, True, None, None), MARKED_ROUNDS[2:]),
    ],
)
def test_marks_decide_which_characters_have_loss(rule, flags, expected):
    conversation = Conversation(ROUNDS, TOOLS, loss=flags)
    assert predicted_text(MARKED, ROUNDS, ChatSettings(rule), conversation) == expected


def test_a_template_that_marks_nothing_of_a_record_falls_back_to_turns():
    marks_thought = MARKED.replace("'<think></think>' + ", "").replace(
        "{% generation %}", "{% generation %}{{ m['reasoning_content'] or '' }}{% endgeneration %}"
    )
    nothing = marks_thought.replace("{{ '<|im_end|>\n' }}{% endgeneration %}", "{{ '<|im_end|>\n' }}")
    assert predicted_text(nothing, CHAT) == ["The quick brown fox.<|im_end|>", "Lazy.<|im_end|>"]
    assert predicted_text(nothing, CHAT, ChatSettings("marks")) == []


def test_marks_that_are_missing_or_of_unknown_messages_are_refused(tmp_path):
    with refused("chat-template-without-marks", UsageError) as caught:
        in_folder(tmp_path, EOS_AT_THE_END, ChatSettings("marks"))
    assert f"of {tmp_path} has no" in caught.value.what
    all_in_one = "{% generation %}" + EOS_AT_THE_END + "{% endgeneration %}"
    assert len(predicted_text(all_in_one, CHAT)) == 1
    with refused("chat-marks-not-usable: its marks cannot be told from", DataError):
        predicted_text(all_in_one, CHAT, ChatSettings("last"))


def test_only_records_whose_template_has_no_marks_are_refused(tmp_path):
    for marked, records in (("default", "with tools"), ("tool_use", "without tools")):
        templates = dict.fromkeys(("default", "tool_use"), CHATML_TOOLS) | {marked: MARKED}
        tokenizer = in_folder(tmp_path / marked, templates, ChatSettings("marks"))
        bare, given = Conversation(CHAT), Conversation(CHAT, TOOLS)
        read, without_marks = (bare, given) if marked == "default" else (given, bare)
        assert any(tokenizer.apply_chat_template(read)[1])
        with refused("chat-marks-not-usable: --chat-loss marks: the chat", DataError) as caught:
            tokenizer.apply_chat_template(without_marks)
        assert f"for records {records} has no" in caught.value.what
