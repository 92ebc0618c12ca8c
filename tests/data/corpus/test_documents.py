"""Files of records: how they are read, what is refused, and the documents that they become."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mkd.data.corpus.documents import encode_record
from mkd.data.records import kinds, parsing
from mkd.data.records.kinds import Record
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows
from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.reported import refused
from tests.tokenizers.trained import train_hf_tokenizer

MESSAGES = [{"role": "user", "content": "Which fox?"}, {"role": "assistant", "content": "The quick one."}]
RECORDS = [{"text": "a"}, {"messages": MESSAGES}, {"prompt": "p", "completion": "c"}]


def document(record, tokenizer, append_eod=True):
    return encode_record(parse_row(json.dumps(record).encode()), tokenizer, append_eod)


def test_jsonl_lines_are_numbered_and_blank_ones_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert list(read_rows(path)) == [(1, b'{"text": "a"}'), (4, b'{"text": "b"}')]


def test_lines_of_a_text_file_are_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf  caf\xc3\xa9 \r\n\n \nb\n")
    rows = list(read_rows(path))
    assert [(number, parse_row(row).values) for number, row in rows] == [(1, ("  caf\u00e9 ",)), (4, ("b",))]
    path.write_bytes(b"caf\xe9\n")
    with refused("record-not-json: not UTF-8"):
        parse_row(next(read_rows(path))[1])


@pytest.mark.parametrize("suffix", ["parquet", "stream.arrow", "file.arrow"])
def test_tables_have_the_same_records(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {
        key: [record.get(key) for record in RECORDS] for key in ("text", "messages", "prompt", "completion")
    }
    table = pa.table({**columns, "id": range(3)})
    path = str(tmp_path / f"t.{suffix}")
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if suffix.startswith("stream") else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table)
    rows = list(read_rows(path))
    assert [number for number, _ in rows] == [1, 2, 3]
    assert [parse_row(row) for _, row in rows] == [
        parse_row(json.dumps(record).encode()) for record in RECORDS
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", ".csv is not a known kind of file"),
        ("a.parquet", b"not parquet", "is not a valid parquet file\n  why: "),
        ("a.arrow", b"not arrow at all", "is not a valid arrow file\n  why: "),
        ("missing.jsonl", None, "cannot be read\n  why: "),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_rows(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value) and message in str(caught.value) and caught.value.do


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b'{"text": "a"', "not valid JSON: "),
        (b"[" * 100_000, "not valid JSON: "),
        (b'{"text": "caf\xe9"}', "not UTF-8: invalid continuation byte at byte 14"),
        (b'[{"text": "a"}]', "a JSON list, not an object"),
        (b"null", "a JSON null, not an object"),
        (b'{"body": "a", "id": 3}', "no known keys (found: 'body', 'id')"),
        (b"{}", "no known keys (found: none)"),
        (b'{"prompt": "a"}', "the record has prompt, but no completion"),
        (b'{"text": null}', "text is null"),
        (b'{"prompt": "a", "completion": null}', "completion is null"),
        (b'{"text": 3}', "text is a number"),
        (b'{"prompt": "a", "completion": ["b"]}', "prompt is a string, completion is a list"),
        (b'{"text": "a", "messages": []}', "the record is text and messages at once"),
        (b'{"messages": []}', "messages is an empty list"),
        (b'{"messages": "hi"}', "messages is a string"),
        (b'{"messages": ["hi"]}', "message 1 is a string"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}',
            "message 2: content is missing or null",
        ),
        (b'{"messages": [{"content": "a"}]}', "message 1: role is missing or null"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "message 1: content, part 1: text is missing or null",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}',
            "message 1: tool_calls, number 1 is a number",
        ),
        (rb'{"text": "a\ud800b"}', "text has half of a surrogate pair at character 2"),
    ],
)
def test_malformed_records(row, what):
    with pytest.raises(DataError) as caught:
        parse_row(row)
    assert caught.value.what.startswith(what) and caught.value.why and caught.value.do


def test_a_json_array_is_told_how_to_become_lines():
    with pytest.raises(DataError) as caught:
        parse_row(b'[{"text": "a"}]')
    assert "jq -c '.[]'" in caught.value.do


def test_text_is_its_ids_and_eos_with_loss_everywhere(tokenizer):
    result = document({"text": "The fox"}, tokenizer)
    assert result.ids.tolist() == [*tokenizer.encode("The fox"), tokenizer.eos_id]
    assert result.loss.tolist() == [1] * len(result.ids)
    assert (result.ids.dtype, result.loss.dtype) == (np.int32, np.uint8)
    assert document({"text": "The fox"}, tokenizer, append_eod=False).ids.tolist() == tokenizer.encode(
        "The fox"
    )
    assert document({"text": ""}, tokenizer).ids.tolist() == [tokenizer.eos_id]


def test_prompt_and_completion_have_one_bos_one_eos_and_loss_on_the_completion():
    from tokenizers import processors

    hf = train_hf_tokenizer(specials=("<|endoftext|>", "<s>"))
    bos, eos = hf.convert_tokens_to_ids(["<s>", "<|endoftext|>"])
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", bos), ("<|endoftext|>", eos)]
    )
    tokenizer = HuggingFaceTokenizer(hf)
    prompt, completion = (
        tokenizer.encode_continuation("Which fox?"),
        tokenizer.encode_continuation(" The quick"),
    )
    result = document({"prompt": "Which fox?", "completion": " The quick"}, tokenizer)
    assert result.ids.tolist() == [bos, *prompt, *completion, eos]
    assert result.loss.tolist() == [0] * (1 + len(prompt)) + [1] * (len(completion) + 1)
    assert document({"text": "Which fox?"}, tokenizer).ids.tolist() == [bos, *prompt, eos]
    assert document({"text": "Which fox?"}, tokenizer, append_eod=False).ids.tolist() == [bos, *prompt]


def test_messages_go_through_the_chat_template(tokenizer):
    result = document({"messages": MESSAGES}, tokenizer)
    ids, loss = tokenizer.apply_chat_template(Conversation(MESSAGES))
    assert (result.ids.tolist(), result.loss.tolist()) == (ids, loss) and 0 < sum(loss) < len(loss)


def test_append_eod_without_an_eos_token():
    hf = train_hf_tokenizer()
    hf.eos_token = None
    with refused("tokenizer-without-eos"):
        document({"text": "a"}, HuggingFaceTokenizer(hf))


def test_a_kind_of_record_may_convert_any_number_of_keys(monkeypatch):
    def join(instruction, given, output):
        return f"{instruction}\n{given}\n", output

    kind = kinds.RecordKind(("instruction", "input", "output"), kinds.PROMPT_COMPLETION, join)
    monkeypatch.setattr(parsing, "KINDS", {**kinds.KINDS, "instruction": kind})
    record = parse_row(b'{"instruction": "Add.", "input": "1 2", "output": "3"}')
    assert record == Record("prompt-completion", ("Add.\n1 2\n", "3"))
    with pytest.raises(DataError, match="input"):
        parse_row(b'{"instruction": "Add.", "input": [1, 2], "output": "3"}')
