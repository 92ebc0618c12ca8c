"""Check the prompts that teachers with contexts read, and the tokens that they teach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.data.aligned.aligned_documents import align_context
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.aligned.context_records import ContextTemplate, context_record
from mkd.data.records.parsing import parse_row
from mkd.data.records.refused_keys import CONTEXTS
from mkd.data.records.wanted import WantedRecords
from mkd.errors import DataError
from mkd.tokenizers.load import open_tokenizer
from tests.tiny_models import add_tokenizer
from tests.train.context_run import TEMPLATE
from tests.xtoken.small_tokenizers import train_byte_level

WANTED = WantedRecords(context=(*CONTEXTS, "solution", "completion"))
MAY_MISS = ContextTemplate("knows", "{prompt} ({solution})", may_miss=True)
HINT = ContextTemplate("knows", "{prompt} ({solution})")
TURNS = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "lazy dog"}]
EARLIER = [{"role": "user", "content": "jumps?"}, {"role": "assistant", "content": "over"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = add_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return open_tokenizer(str(folder))


def read(tokenizer, template=HINT, **fields):
    """Return the teacher's text, and the texts of both sides of the chunks."""
    aligned = context_record(parse_row(fields, WANTED), tokenizer, True, template)
    own, theirs = (
        "".join(tokenizer.decode(ids[first:last].tolist()) for first, last in aligned.chunks[:, columns])
        for ids, columns in ((aligned.student_ids, [0, 1]), (aligned.teacher_ids, [2, 3]))
    )
    assert own == theirs
    assert (aligned.chunks[:, 1] - aligned.chunks[:, 0] == 1).all()
    return tokenizer.decode(aligned.teacher_ids.tolist()), own


def test_the_template_replaces_the_last_question_of_a_conversation(tokenizer):
    text, taught = read(tokenizer, messages=EARLIER + TURNS, solution="dog")
    assert taught == "lazy dog<|endoftext|>"
    assert text == "u:jumps?<|endoftext|>a:over<|endoftext|>u:fox? (dog)<|endoftext|>a:" + taught
    with_system = ContextTemplate("knows", "{prompt}", system="Know {solution}.")
    for system in ([], [{"role": "system", "content": "old"}]):
        text, _ = read(tokenizer, with_system, messages=system + TURNS, solution=7)
        assert text == "s:Know 7.<|endoftext|>u:fox?<|endoftext|>a:" + taught


def test_the_template_replaces_a_prompt(tokenizer):
    text, taught = read(tokenizer, prompt="fox", completion=" dog", solution="lazy")
    assert (text, taught) == ("fox (lazy) dog<|endoftext|>", " dog<|endoftext|>")
    text, _ = read(
        tokenizer, ContextTemplate("knows", "{completion}? {prompt}"), prompt="fox", completion=" dog"
    )
    assert text == " dog? fox dog<|endoftext|>"


def test_the_record_brings_its_own_context(tokenizer):
    own = [{"role": "user", "content": "over?"}]
    text, taught = read(tokenizer, messages=EARLIER + TURNS, teacher_messages=own)
    assert text == "u:over?<|endoftext|>a:" + taught
    text, _ = read(tokenizer, messages=EARLIER + TURNS, teacher_prompt="over?", solution="unread")
    assert text.endswith("a:over<|endoftext|>u:over?<|endoftext|>a:" + taught)
    text, _ = read(tokenizer, prompt="fox", completion=" dog", teacher_prompt="lazy")
    assert text == "lazy dog<|endoftext|>"
    default = ContextTemplate("knows", "{prompt}\n\n{privileged_context}")
    for given in ("quick", {"knows": "quick", "other": "slow"}):
        text, _ = read(tokenizer, default, prompt="fox", completion=" dog", privileged_context=given)
        assert text == "fox\n\nquick dog<|endoftext|>"
    default = ContextTemplate("knows", "{prompt} {privileged_context}", fallbacks=("{prompt}!",))
    text, _ = read(tokenizer, default, prompt="fox", completion=" dog", privileged_context={"other": "slow"})
    assert text == "fox! dog<|endoftext|>"


def test_the_first_tokens_of_a_completion_may_be_left_out(tokenizer):
    template = ContextTemplate("knows", "{prompt}", skip_first=1)
    _, taught = read(tokenizer, template, prompt="fox", completion=" dog")
    assert taught == "<|endoftext|>"
    _, taught = read(
        tokenizer, ContextTemplate("knows", "{prompt}", skip_first=9), prompt="fox", completion=" dog"
    )
    assert taught == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "fox"},
        {"messages": TURNS},
        {"messages": TURNS, "solution": None},
        {"messages": TURNS, "privileged_context": {"other": "slow"}},
        {"prompt": "", "completion": "dog", "solution": "lazy"},
    ],
)
def test_a_record_without_a_context_is_bad_unless_it_may_be_skipped(fields, tokenizer):
    with pytest.raises(DataError, match="no context for the teacher knows"):
        read(tokenizer, **fields)
    text, taught = read(tokenizer, ContextTemplate("knows", HINT.user, may_miss=True), **fields)
    assert text == taught == ""


@pytest.mark.parametrize(
    "fields, text",
    [
        (
            {"messages": TURNS, "teacher_prompt": "a", "privileged_context": "b"},
            "teacher_prompt and privileged",
        ),
        ({"messages": TURNS, "privileged_context": "b"}, "no text of this teacher's context has a field"),
        ({"messages": TURNS, "solution": ["a"]}, "solution is a"),
        ({"messages": TURNS, "teacher_messages": TURNS}, "ends with an answer"),
        ({"messages": TURNS, "teacher_prompt": 3}, "teacher_prompt is a"),
        ({"messages": TURNS[1:], "solution": "a"}, "no user message"),
        ({"prompt": "a", "completion": "b", "teacher_messages": TURNS[:1]}, "beside a prompt that is a text"),
    ],
)
def test_a_context_that_is_not_valid_is_a_bad_record(fields, text, tokenizer):
    with pytest.raises(DataError, match=text):
        read(tokenizer, ContextTemplate("knows", HINT.user, may_miss=True), **fields)


def test_a_text_prompt_has_no_place_for_a_system_message(tokenizer):
    with pytest.raises(DataError, match="no place for the teacher's system message"):
        read(tokenizer, ContextTemplate("knows", "{prompt}", system="s"), prompt="fox", completion=" dog")


def test_the_first_text_with_all_values_counts(tokenizer):
    several = ContextTemplate("knows", "{prompt} {hint}", fallbacks=("{prompt} ({solution})", "{prompt}!"))
    wanted = WantedRecords(context=several.keys)
    for more, expected in (
        (dict(hint="dog", solution="x"), "fox dog"),
        (dict(solution="x"), "fox (x)"),
        ({}, "fox!"),
    ):
        row = dict(prompt="fox", completion=" dog") | more
        aligned = context_record(parse_row(row, wanted), tokenizer, True, several)
        assert tokenizer.decode(aligned.teacher_ids.tolist()) == expected + " dog<|endoftext|>"


def test_a_teacher_with_other_tokens_reads_its_prompt_and_the_same_text(tokenizer, tmp_path):
    train_byte_level(600).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("<|endoftext|>", "</s>"))
    theirs = open_tokenizer(str(tmp_path))
    template = ContextTemplate("knows", "{prompt} ({solution})", skip_first=1)
    pair = Pair(tokenizer, theirs, "byte_offset", True, True, context=template)
    aligned = align_context(parse_row(dict(messages=EARLIER + TURNS, solution="dog"), WANTED), pair, template)
    text = theirs.decode(aligned.teacher_ids.tolist())
    assert text == "u:jumps?</s>a:over</s>u:fox? (dog)</s>a:lazy dog</s>"
    plain = align_context(parse_row(dict(messages=TURNS), WANTED), replace(pair, context=None), MAY_MISS)
    assert len(plain.teacher_ids) == len(plain.chunks) == 0
    own, its = (
        ["".join(reader.decode(ids[a:b].tolist())) for a, b in aligned.chunks[:, columns]]
        for reader, ids, columns in (
            (tokenizer, aligned.student_ids, [0, 1]),
            (theirs, aligned.teacher_ids, [2, 3]),
        )
    )
    assert own[:-1] == its[:-1] and (own[-1], its[-1]) == ("<|endoftext|>", "</s>")
    assert "lazy dog".endswith("".join(own[:-1])) and len(own) > 1
