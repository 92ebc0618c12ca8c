"""Check prompts from records: both kinds, other keys, tables, and what is refused."""

from __future__ import annotations

import json

import pytest

from mkd.data.prompt_readers import PromptReader
from mkd.data.prompts import read_prompts
from mkd.data.quarantine import append
from mkd.errors import DataError, ErrorList
from mkd.tokenizers.load import open_tokenizer
from tests.reported import refused
from tests.tiny_models import add_tokenizer
from tests.train.command import write_records

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = add_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return open_tokenizer(str(folder))


def read(path, tokenizer, **settings):
    return read_prompts([str(path)], tokenizer, **dict(longest=50, vocab_size=300) | settings)


def test_both_kinds_keep_their_other_keys(tokenizer, tmp_path):
    question = [{"role": "user", "content": "a fox?"}]
    path = write_records(
        tmp_path / "p.jsonl",
        {"prompt": "the fox", "answer": 4},
        {"messages": question, "level": "hard"},
        {"messages": [*question, {"role": "assistant", "content": "yes"}]},
        {"prompt": "the fox", "completion": " jumps"},
    )
    found = read(path, tokenizer)
    texts = [tokenizer.decode(one.ids.tolist()) for one in found.prompts]
    chat = "<user>a fox?<|endoftext|><assistant>"
    assert texts == ["the fox", chat, chat, "the fox"]
    assert [dict(one.fields) for one in found.prompts] == [
        {"answer": 4},
        {"level": "hard"},
        {},
        {"completion": " jumps"},
    ]
    assert [one.line for one in found.prompts] == [1, 2, 3, 4]


def test_answers_count_only_for_rewards(tokenizer, tmp_path):
    paths = [
        write_records(tmp_path / f"{n}.jsonl", {"prompt": "the fox", "answer": answer, "level": 1})
        for n, answer in enumerate((4, 5))
    ]
    prints = {
        judged: [read(path, tokenizer, with_fields=judged).fingerprint for path in paths]
        for judged in (False, True)
    }
    assert prints[False][0] == prints[False][1] and len({prints[False][0], *prints[True]}) == 3


def test_a_table_has_the_same_prompts(tokenizer, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"prompt": ["the fox", "dog"], "answer": [1, 2]}), tmp_path / "p.parquet")
    lines = write_records(
        tmp_path / "p.jsonl", {"prompt": "the fox", "answer": 1}, {"prompt": "dog", "answer": 2}
    )
    table, text = read(tmp_path / "p.parquet", tokenizer), read(lines, tokenizer)
    assert table.fingerprint == text.fingerprint
    assert [dict(one.fields) for one in table.prompts] == [dict(one.fields) for one in text.prompts]


@pytest.mark.parametrize(
    "record, settings, code",
    [
        ({"text": "the fox"}, {}, "record-incomplete"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {}, "record-incomplete"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, {}, "record-incomplete"),
        ({"prompt": ""}, {}, "record-empty: the prompt is empty"),
        ({"prompt": "the quick brown fox"}, {"longest": 2}, "longer-than-seq-length: tokens, more than"),
        ({"prompt": "zz"}, {"vocab_size": 1}, "token-beyond-vocabulary: the prompt has id"),
        ({"prompt": 3}, {}, "record-field-not-text: it must be a string"),
        ("not json", {}, "record-not-json: not valid JSON"),
    ],
)
def test_bad_records_are_named_or_skipped(record, settings, code, tokenizer, tmp_path):
    path = write_records(tmp_path / "p.jsonl", {"prompt": "a"}, record)
    if code == "token-beyond-vocabulary: the prompt has id":
        path = write_records(path, record)
    with refused(code, DataError) as caught:
        read(path, tokenizer, **settings)
    assert f"{path}:" in caught.value.what
    if code != "token-beyond-vocabulary: the prompt has id":
        found = read(path, tokenizer, max_bad_records=1, **settings)
        assert (len(found), found.num_bad_records) == (1, 1)


def test_many_bad_records_are_one_list(tokenizer, tmp_path):
    path = write_records(tmp_path / "p.jsonl", *({"text": str(i)} for i in range(20)))
    with pytest.raises(ErrorList) as caught:
        read(path, tokenizer, max_bad_records=3)
    assert len(caught.value.errors) == 10


def test_each_file_may_have_bad_records_and_all_are_listed(tokenizer, tmp_path):
    long = {"prompt": "the quick brown fox " * 9}
    paths = [
        write_records(tmp_path / "a.jsonl", {"prompt": "a"}, "not json"),
        write_records(tmp_path / "b.jsonl", long, {"prompt": "b"}),
    ]
    calls: list[None] = []
    settings = {"max_bad_records": 1, "progress": lambda: calls.append(None)}
    found = read_prompts([str(path) for path in paths], tokenizer, 16, 300, **settings)
    assert (len(found), found.num_bad_records) == (2, 2)
    assert len(calls) == 4  # each record is progress
    listed = tmp_path / "log" / "quarantine.jsonl"
    append(found.bad_records, listed)
    entries = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(one["file"], one["line"]) for one in entries] == [(str(paths[0]), 2), (str(paths[1]), 1)]
    assert entries[0]["reason"].startswith("not valid JSON") and "more than 16" in entries[1]["reason"]


def test_every_teacher_reads_prompts_in_its_own_template(tokenizer, tmp_path):
    """A record that a teacher's template refuses is a bad record with the teacher's name."""
    other = add_tokenizer(tmp_path / "other", 290)
    (other / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}"
    )
    theirs = open_tokenizer(str(other))
    teachers = {"big": PromptReader(theirs)}
    records = [{"messages": [{"role": "user", "content": text}]} for text in ("a fox?", "no")]
    path = write_records(tmp_path / "p.jsonl", {"prompt": "the fox"}, *records)
    found = read(path, tokenizer, teachers=teachers, max_bad_records=1)
    texts = [theirs.decode(one.of_teachers["big"].tolist()) for one in found.prompts]
    assert texts == ["the fox", "[a fox?]"] and [one.is_chat for one in found.prompts] == [False, True]
    assert found.fingerprint != read(path, tokenizer, max_bad_records=1).fingerprint
    with refused("chat-template-refuses") as caught:
        read(path, tokenizer, teachers=teachers)
    assert caught.value.entry["teacher"] == "big" and caught.value.entry["line"] == 3
