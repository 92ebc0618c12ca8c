"""Keys and columns that nothing reads are named with their counts, in every kind of file."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest

from mkd.data.corpus.encoding import FileRows
from mkd.data.corpus.store_builder import build_store
from mkd.data.prompts import read_prompts
from mkd.data.records.parsing import parse_row
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.datasets import open_datasets
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

NAMES_SPEAKERS = CHATML.replace("message['role'] + '\n'", "message['role'] + (message.name or '') + '\n'")


def records():
    """Yield 150 conversations: 150 have a source, 148 a score; 150 of their messages names, 3 weights."""
    for number in range(150):
        ask = {"role": "user", "content": f"fox {number}?", "name": "Ann"}
        answer = {"role": "assistant", "content": "A fox."} | ({"weight_2": 1} if number > 146 else {})
        score = None if number < 2 else number
        yield {"messages": [ask, answer], "source": "web", "score": score, "tools": None}


def notes(path, folder, tokenizer, **settings):
    return build_store([str(path)], str(folder / "c"), tokenizer, True, **settings).note_lines()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("template", "names"), [(CHATML, "name (150), "), (NAMES_SPEAKERS, "")], ids=["plain", "names speakers"]
)
def test_counts_of_a_file(tmp_path, write_jsonl, suffix, template, names):
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path.name, *records())
    else:
        write_table(path, list(records()))
    said = notes(path, tmp_path, HuggingFaceTokenizer(train_hf_tokenizer(template)))
    expected = f"ignored keys: source (150), score (148); of messages: {names}weight_2 (3)"
    assert said == [f"{path}: {expected}"]


def write_table(path, rows):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=64)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=64)


def test_cut_texts_keep_their_counts(write_jsonl):
    rows = [{"text": "fox " * (number % 5), "id": number} for number in range(300)]
    path = write_jsonl("a.jsonl", *rows, {"text": "a fox " * 200_000, "id": 300, "long": True})
    counts = Counter()
    for batch in FileRows([path]):
        counts += batch.left_out
        counts.update(key for _, row in batch.rows for key in parse_row(row).ignored)
    assert counts == {"id": 301, "long": 1}


def test_files_without_such_keys_say_nothing(tmp_path, write_jsonl, tokenizer):
    rows = [{"text": "a fox"}, {"prompt": "p", "completion": "c", "source": None}]
    assert notes(write_jsonl("a.jsonl", *rows), tmp_path, tokenizer) == []
    many = write_jsonl("b.jsonl", {"text": "a fox"} | {f"key_{n:02}": 1 for n in range(20)})
    (line,) = notes(many, tmp_path, tokenizer)
    assert line.endswith("key_11 (1), and 8 more")


def test_a_cached_corpus_says_it_again(tmp_path, write_jsonl, tokenizer, caplog):
    caplog.set_level(logging.INFO, "mkd")
    for name in ("a.jsonl", "copy.jsonl"):
        path = write_jsonl(name, {"text": "a fox", "id": 1}, {"text": "a dog", "id": 2})
        settings = dict(tokenizer=tokenizer, seq_length=16, vocab_size=tokenizer.vocab_size)
        open_datasets(data_path=[path], cache_dir=str(tmp_path / "cache"), **settings)
        assert f"{path}: ignored keys: id (2)" in caplog.messages
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 2  # names differ; each was tokenised
    caplog.clear()
    open_datasets(data_path=[path], cache_dir=str(tmp_path / "cache"), **settings)
    assert caplog.messages == [f"{path}: ignored keys: id (2)"]


def test_keys_of_prompts_are_for_the_reward_function(tmp_path, write_jsonl, tokenizer, caplog):
    caplog.set_level(logging.INFO, "mkd")
    ask = [{"role": "user", "content": "a fox?", "mood": "calm"}]
    path = write_jsonl("p.jsonl", {"messages": ask, "answer": 4}, {"prompt": "a fox", "answer": None})
    said = []
    for judged in (True, False):
        caplog.clear()
        read_prompts([path], tokenizer, longest=50, vocab_size=1000, with_fields=judged)
        said += caplog.messages
    of_messages = "of messages: mood (1)"
    assert said == [f"{path}: ignored keys {of_messages}", f"{path}: ignored keys: answer (1); {of_messages}"]


@pytest.mark.parametrize("share, is_noted", [(51, True), (50, False)])
@pytest.mark.parametrize(
    ("rendered", "others"),
    [
        ({"text": "<|im_start|>user\na fox?<|im_end|>\n"}, {"text": "a fox"}),
        ({"text": "You are a fox.\n<|im_start|>user\na fox?<|im_end|>"}, {"text": "a fox"}),
        ({"prompt": "<|im_start|>user\na fox?"}, {"prompt": "a fox", "completion": "a"}),
        ({"completion": "a<|im_start|>"}, {"prompt": "a fox", "completion": "a"}),
        ({"chosen": "a<|im_start|>"}, {"prompt": "a fox", "chosen": "a", "rejected": "b"}),
    ],
    ids=["text", "later", "prompt", "completion", "pair"],
)
def test_texts_that_were_rendered_are_noted(
    tmp_path, write_jsonl, tokenizer, rendered, others, share, is_noted
):
    rows = [others | (rendered if number < share else {}) for number in range(100)] + [others | rendered] * 50
    path = write_jsonl("a.jsonl", *rows)
    said = notes(path, tmp_path, tokenizer)
    assert len(said) == is_noted
    if is_noted:
        assert "51 of the first 100 texts spell a control token, such as <|im_start|>" in said[0]
        assert "`messages`" in said[0]


def test_lines_of_text_that_were_rendered_are_noted(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a fox<|endoftext|>\n<|im_start|>user a fox?<|im_end|>\n")
    (said,) = notes(tmp_path / "a.txt", tmp_path, tokenizer)
    assert "2 of the first 2 texts spell a control token" in said


@pytest.mark.parametrize("key", ["messages", "pair"])
def test_messages_that_hold_what_the_template_writes_are_noted(tmp_path, write_jsonl, key):
    ask, answer = {"role": "user", "content": "fox?"}, {"role": "assistant", "content": "Yes.<|im_end|>"}
    pair = {"prompt": [ask], "chosen": [answer], "rejected": [answer | {"content": "No."}]}
    path = write_jsonl("a.jsonl", *[pair if key == "pair" else {"messages": [ask, answer]}] * 3)
    said = notes(path, tmp_path, HuggingFaceTokenizer(train_hf_tokenizer(CHATML)))
    if key == "pair":  # half of the conversations is not most of them
        assert said == []
    else:
        assert "messages of 3 of the first 3 conversations spell <|im_end|>, which the" in said[0]


def test_records_that_nothing_learns_from_are_counted(tmp_path, write_jsonl):
    ask, answer = {"role": "user", "content": "fox?"}, {"role": "assistant", "content": "Yes."}
    rows = [
        *[{"messages": [ask, answer]}] * 3,
        {"messages": [ask]},
        {"messages": [ask, answer | {"role": "expert"}]},
        {"messages": [ask, answer | {"weight": 0}]},
        {"tokens": {"ids": [1, 2], "loss": [0, 0]}},
    ]
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer(CHATML))
    said = notes(write_jsonl("a.jsonl", *rows), tmp_path, tokenizer)
    assert [line.partition(": ")[2] for line in said] == [
        "4 of 7 records have no token with loss, so nothing learns from them; "
        "2 have no message of the role assistant (their roles: expert, user)"
    ]


def test_keys_that_the_template_has_as_variables_are_named(tmp_path, write_jsonl):
    template = (
        "{% for one in documents or [] %}{{ one.text }}{% endfor %}{% if brief %}brief{% endif %}" + CHATML
    )
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer(template))
    chat = {"messages": [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "Yes."}]}
    record = chat | {"documents": [{"text": "A fox is quick."}], "brief": True, "range": 1}
    said = notes(write_jsonl("a.jsonl", record), tmp_path, tokenizer)
    hint = 'To set brief in the chat template, write "chat_template_kwargs": {"brief": ...}'
    assert [line.partition(": ")[2] for line in said] == [f"ignored keys: brief (1), range (1). {hint}"]
    ids, _ = tokenizer.apply_chat_template(parse_row(record).values[0])
    assert tokenizer.decode(ids).startswith("A fox is quick.<|im_start|>")
    plain = HuggingFaceTokenizer(train_hf_tokenizer(CHATML))
    for given in (record, record | {"documents": ["a.txt"]}):  # the second is data of the user's
        (said,) = notes(write_jsonl("b.jsonl", given), tmp_path, plain)
        assert said.endswith("ignored keys: brief (1), documents (1), range (1)")


def test_variables_that_the_template_does_not_read_are_named(tmp_path, write_jsonl):
    template = "{% set brief = brief | default(true) %}{% if brief %}brief{% endif %}" + CHATML
    ask = {"messages": [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "Yes."}]}
    path = write_jsonl("a.jsonl", *[ask | {"chat_template_kwargs": {"brief": True, "thinking": True}}] * 3)
    said = notes(path, tmp_path, HuggingFaceTokenizer(train_hf_tokenizer(template)))
    assert said == [f"{path}: ignored keys: chat_template_kwargs.thinking (3)"]


def test_meta_holds_what_is_said(tmp_path, write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", {"text": "a fox", "id": 1})
    build_store([path], str(tmp_path / "c"), tokenizer, True)
    assert json.loads((tmp_path / "c.meta.json").read_text())["notes"] == {path: ["ignored keys: id (1)"]}
