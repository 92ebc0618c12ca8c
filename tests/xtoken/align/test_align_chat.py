"""Conversations in two chat templates, and completions: which tokens are aligned."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.xtoken import align_chat, align_completion
from tests.reported import refused
from tests.tokenizers.test_chat import COUNTS_MARKED
from tests.tokenizers.trained import CHATML, llama_tokenizer, train_hf_tokenizer

INSTRUCTION = (  # as Llama 2: a blank before the answer and before the end-of-turn token
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def chatml_with(content):
    """Return ChatML that writes `content` as the content of a message."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + "
        + content
        + " + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


DROPS_REASONING = chatml_with("m['content'].split('</think>')[-1].strip()")
OTHER_TAGS = chatml_with("m['content'].replace('<think>', '[[').replace('</think>', ']]')")
JOINED = "m['content'] | map(attribute='text', default='<img>') | join"
READS_PARTS = chatml_with(f"(m['content'] if m['content'] is string else {JOINED})")
SHOUTS = chatml_with("m['content'] | upper")
CHAT = [
    {"role": "user", "content": "Which fox?"},
    {"role": "assistant", "content": "The quick brown fox."},
    {"role": "user", "content": "And the dog?"},
    {"role": "assistant", "content": "Lazy \u4f60."},
]
REASONED = [CHAT[0], {"role": "assistant", "content": "<think>\nThe think fox?\n</think>\n\nThe fox."}]


def with_template(template, **options):
    return HuggingFaceTokenizer(train_hf_tokenizer(template, **options))


def texts(aligned, student, teacher):
    """Return the decoded (student, teacher) tokens of each run of chunks that touch on both sides."""
    runs = []
    for a, b, c, d in aligned.chunks.tolist():
        if runs and (a, c) == (runs[-1][1], runs[-1][3]):
            runs[-1][1], runs[-1][3] = b, d
        else:
            runs.append([a, b, c, d])
    return [
        (student.decode(aligned.student_ids[a:b].tolist()), teacher.decode(aligned.teacher_ids[c:d].tolist()))
        for a, b, c, d in runs
    ]


def test_answers_and_their_ends_under_different_templates():
    student, teacher = with_template(CHATML), with_template(INSTRUCTION, vocab_size=300)
    aligned = align_chat(student, teacher, CHAT)
    assert aligned.student_ids.tolist() == student.apply_chat_template(Conversation(CHAT))[0]
    assert aligned.teacher_ids.tolist() == teacher.apply_chat_template(Conversation(CHAT))[0]
    pairs = texts(aligned, student, teacher)
    assert [one for one, _ in pairs] == ["The quick brown fox.", "<|im_end|>", "Lazy \u4f60.", "<|im_end|>"]
    assert [other.strip() for _, other in pairs] == [
        "The quick brown fox.",
        "<|endoftext|>",
        "Lazy \u4f60.",
        "<|endoftext|>",
    ]


def test_blanks_around_an_answer_are_part_of_it_where_both_templates_keep_them():
    student, teacher = with_template(chatml_with("m['content']")), with_template(INSTRUCTION, vocab_size=300)
    chat = [CHAT[0], {"role": "assistant", "content": "\n The fox.\n\n"}]
    pairs = texts(align_chat(student, teacher, chat), student, teacher)
    assert (
        pairs[0][0] == "\n The fox.\n\n"
        and "".join(other for _, other in pairs[:-1]).strip(" ") == "\n The fox.\n\n"
    )
    strips = with_template(DROPS_REASONING, vocab_size=300)
    assert texts(align_chat(student, strips, chat), student, strips)[0] == ("The fox.", "The fox.")


def test_only_tokens_with_loss_are_aligned():
    student, teacher = with_template(CHATML), with_template(DROPS_REASONING)
    aligned = align_chat(student, teacher, CHAT)
    for tokenizer, starts, ends in ((student, 0, 1), (teacher, 2, 3)):
        _, mask = tokenizer.apply_chat_template(Conversation(CHAT))
        covered = np.zeros(len(mask), dtype=int)
        for chunk in aligned.chunks.tolist():
            covered[chunk[starts] : chunk[ends]] += 1
        assert covered.tolist() == mask


CALLS = CHATML.replace(
    "message['content'] | trim",
    "(message['content'] or '') }}{% for call in message.tool_calls %}<{{ call.function.name }}: "
    "{{ call.function.arguments | tojson }}>{% endfor %}{{ ''",
)


def test_identical_sides_pair_every_answer_token_with_itself():
    student = with_template(CHATML)
    chunks = align_chat(student, student, CHAT).chunks
    assert np.array_equal(chunks[:, :2], chunks[:, 2:]) and (chunks[:, 1] - chunks[:, 0] == 1).all()
    assert len(chunks) == sum(student.apply_chat_template(Conversation(CHAT))[1])


@pytest.mark.parametrize(
    ("teacher", "reasoning", "expected"),
    [
        (CHATML, True, [REASONED[1]["content"] + "<|im_end|>"]),
        (CHATML, False, ["The fox.<|im_end|>"]),
        (DROPS_REASONING, True, ["The fox.<|im_end|>"]),
        (OTHER_TAGS, True, ["The think fox?", "The fox.<|im_end|>"]),
    ],
    ids=["kept", "left out", "dropped", "other tags"],
)
def test_reasoning(teacher, reasoning, expected):
    student, teacher = with_template(CHATML), with_template(teacher)
    pairs = texts(align_chat(student, teacher, REASONED, reasoning=reasoning), student, teacher)
    assert pairs == [(text, text) for text in expected]


def test_a_template_without_end_of_turn_gives_no_pair_for_it():
    student, teacher = with_template(CHATML), with_template(NO_END)
    assert [one for one, _ in texts(align_chat(student, teacher, CHAT), student, teacher)] == [
        "The quick brown fox.",
        "Lazy \u4f60.",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_aligned_whatever_its_key(key):
    template = chatml_with("(m['reasoning_content'] or '') + '|' + m['content']")
    student, teacher = with_template(template), with_template(template, vocab_size=290)
    answer = {"role": "assistant", "content": "The fox.", key: "The lazy dog."}
    pairs = texts(align_chat(student, teacher, [CHAT[0], answer]), student, teacher)
    assert pairs == [(part, part) for part in ("The lazy dog.", "The fox.<|im_end|>")]


def test_modes_agree_and_an_answer_of_blanks_has_only_its_end():
    student, teacher = with_template(CHATML), with_template(DROPS_REASONING, vocab_size=290)
    exact, found = (align_chat(student, teacher, CHAT, mode=mode).chunks for mode in ("byte_offset", "dp"))
    assert np.array_equal(exact, found)
    for blanks in ("", "  ", "\n \n"):
        answer = [CHAT[0], {"role": "assistant", "content": blanks}]
        assert texts(align_chat(student, teacher, answer), student, teacher) == [("<|im_end|>", "<|im_end|>")]
    assert align_chat(student, teacher, CHAT[:1]).chunks.shape == (0, 4)


def test_what_cannot_be_aligned_is_refused_with_the_folder_of_the_template(spm_file, tmp_path):
    student = with_template(CHATML)
    with refused("chat-template-missing", DataError):
        align_chat(student, spm_file, CHAT)
    for teacher, template in ((SHOUTS, "writes"), (COUNTS_MARKED, "rewrites")):
        train_hf_tokenizer(teacher).save_pretrained(tmp_path / template)
        with refused("chat-turn-not-found", DataError) as caught:
            align_chat(student, str(tmp_path / template), CHAT)
        assert f"the chat template of {tmp_path / template}" in caught.value.what
        assert "generation" not in caught.value.do


def test_texts_around_images_are_aligned():
    parts = [{"type": "text", "text": " The fox "}, {"type": "image"}, {"type": "text", "text": "and a dog."}]
    answer = [CHAT[0], {"role": "assistant", "content": parts}]
    student, teacher = with_template(READS_PARTS), with_template(READS_PARTS, vocab_size=290)
    pairs = texts(align_chat(student, teacher, answer), student, teacher)
    assert [one for one, _ in pairs] == ["The fox", "and a dog.<|im_end|>"] and all(a == b for a, b in pairs)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (CALLS, ["find", '{"what": "fox", "count": 2}']),
        (CALLS.replace("arguments | tojson", "arguments.values() | join(';')"), ["find", "fox", "2"]),
    ],
    ids=["json", "values"],
)
def test_calls_of_tools_are_aligned(other, expected):
    function = {"name": "find", "arguments": {"what": "fox", "count": 2}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    student, teacher = with_template(CALLS), with_template(other, vocab_size=290)
    pairs = texts(align_chat(student, teacher, [CHAT[0], call]), student, teacher)
    assert "".join(one for one, _ in pairs[:-1]) == "".join(expected)
    assert all(a == b for a, b in pairs) and pairs[-1][0] == "<|im_end|>"


def test_completion():
    student, teacher = with_template(None), HuggingFaceTokenizer(llama_tokenizer())
    aligned = align_completion(student, teacher, "Which? ", "the fox")
    assert aligned.student_ids.tolist() == student.encode("Which? ") + student.encode_continuation("the fox")
    assert aligned.teacher_ids.tolist() == teacher.encode("Which? ") + teacher.encode_continuation("the fox")
    first = aligned.chunks[0]
    assert (first[0], first[2]) == (len(student.encode("Which? ")), len(teacher.encode("Which? ")))
    assert texts(aligned, student, teacher) == [("the fox", "the fox")]


@pytest.mark.download
def test_qwen3_and_smollm2(real_tokenizers):
    student, teacher = real_tokenizers["smollm2"], real_tokenizers["qwen3"]
    pairs = texts(align_chat(student, teacher, [*REASONED, *CHAT[2:]]), student, teacher)
    # Qwen3 drops earlier reasoning.
    assert [one for one, _ in pairs] == ["The fox.<|im_end|>", "Lazy \u4f60.<|im_end|>"]
    assert all(one == other for one, other in pairs)
    pairs = texts(align_chat(student, teacher, REASONED), student, teacher)
    assert pairs == [(REASONED[1]["content"] + "<|im_end|>",) * 2]
