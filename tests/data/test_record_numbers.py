"""Numbers of records: read beside the texts, kept with the corpus, and values of the packs' rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mkd.data.batch import RECORD, collate
from mkd.data.corpus import encoding
from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import build_store, cache_key
from mkd.data.first_records import kinds_of_records
from mkd.data.records.wanted import WantedRecords
from mkd.errors import DataError, MkdError
from mkd.parallel.zigzag import RowShard
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.datasets import open_datasets
from tests.reported import refused
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

NUMBER = WantedRecords(numbers=("weight",))
WEIGHT = WantedRecords(numbers=("weight",), weights=("weight",))
SAID = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "The quick one."}]
RECORDS = [
    {"prompt": "Which fox?", "completion": " The quick one.", "weight": 0.5},
    {"prompt": "Which dog?", "completion": " The lazy one.", "weight": 2},
    {"messages": SAID, "weight": 0.125},
    {"text": "The quick brown fox jumps over the lazy dog. " * 4, "weight": 3.0},
]


def opened(path, tokenizer, folder, wanted=WEIGHT, **more):
    settings = dict(seq_length=64, vocab_size=tokenizer.vocab_size, cache_dir=str(folder)) | more
    return open_datasets(data_path=[path], tokenizer=tokenizer, records=wanted, **settings)[0]


@pytest.fixture(scope="module")
def chat_tokenizer():
    return HuggingFaceTokenizer(train_hf_tokenizer(CHATML))


def test_every_loss_row_knows_the_number_of_its_record(tmp_path, chat_tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", *RECORDS)
    data = opened(path, chat_tokenizer, tmp_path / "cache", document_multiple=4)
    (store,) = (member.store for member in data.members)
    assert store.numbers["weight"].tolist() == [0.5, 2.0, 0.125, 3.0]
    batch = collate([*(data[i] for i in range(len(data))), data.empty_pack()])
    weights = batch.of_loss_rows(f"{RECORD}weight")
    loss_tokens = {float(record["weight"]): 0 for record in RECORDS}
    for index, record in enumerate(RECORDS):
        ids, loss = store.document(index)
        loss_tokens[float(record["weight"])] = int(loss[1:].sum())
    assert {w: int((weights == w).sum()) for w in loss_tokens} == loss_tokens
    assert batch.row_sums == {f"{RECORD}weight": sum(w * n for w, n in loss_tokens.items())}
    shards = [batch.shard(RowShard(rank, 2)) for rank in range(2)]
    together = torch.cat([one.of_loss_rows(f"{RECORD}weight") for one in shards])
    assert sorted(together.tolist()) == sorted(weights.tolist())
    assert all(one.row_sums == batch.row_sums for one in shards)
    padding = collate([data.empty_pack()])
    assert padding.of_loss_rows(f"{RECORD}weight").tolist() == [] and padding.row_sums == {}


def test_numbers_of_tables_and_of_texts_that_are_cut(tmp_path, tokenizer, write_jsonl, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": ["a fox", "a dog"], "weight": [0.5, 2.0], "id": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    prefix = str(tmp_path / "t")
    summary = build_store([str(tmp_path / "t.parquet")], prefix, tokenizer, True, wanted=NUMBER)
    assert TokenStore(prefix).numbers["weight"].tolist() == [0.5, 2.0]
    assert summary.note_lines() == [f"{tmp_path / 't.parquet'}: ignored keys: id (2)"]
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 10)
    path = write_jsonl(
        "cut.jsonl", {"text": "one\ntwo four six", "label": True, "id": 3}, {"text": "a", "label": False}
    )
    summary = build_store([path], prefix, tokenizer, True, wanted=WantedRecords(numbers=("label",)))
    assert TokenStore(prefix).numbers["label"].tolist() == [1.0, 1.0, 0.0]
    assert summary.note_lines() == [f"{path}: ignored keys: id (1)"]


@pytest.mark.parametrize("value", [None, "0.5", [1], 1e39])
def test_a_record_without_its_number_is_a_bad_one(value, tmp_path, tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", RECORDS[0], {"text": "a fox", "weight": value})
    with refused("record-value-not-valid: the loss of this run reads a number there") as caught:
        build_store([path], str(tmp_path / "c"), tokenizer, True, wanted=NUMBER)
    assert f"{path}:2: weight is " in caught.value.what
    summary = build_store([path], str(tmp_path / "c"), tokenizer, True, wanted=NUMBER, max_bad_records=1)
    assert (summary.documents, summary.bad_records, summary.numbers) == (1, 1, ("weight",))


def test_weights_are_numbers_above_0(tmp_path, tokenizer, write_jsonl):
    """Others are bad records, which --max-bad-records skips; in a tokenised corpus they end the run."""
    bad = [{"text": "a fox", "weight": value} for value in (0, -1, True)]
    path = write_jsonl("a.jsonl", RECORDS[0], *bad)
    with refused("record-value-not-valid: it weighs the record in the loss") as caught:
        opened(write_jsonl("b.jsonl", RECORDS[0], bad[0]), tokenizer, tmp_path / "c")
    assert caught.value.what.endswith("b.jsonl:2: weight is 0, not above 0")
    with pytest.raises(MkdError) as several:
        kinds_of_records("--data-path", path, 2, WEIGHT)
    assert "-1, not above 0" in str(several.value) and "weight is a boolean" in str(several.value)
    prefix = str(tmp_path / "w")
    summary = build_store([path], prefix, tokenizer, True, wanted=WEIGHT, max_bad_records=3)
    assert (summary.bad_records, TokenStore(prefix).numbers["weight"].tolist()) == (3, [0.5])
    build_store([path], prefix, tokenizer, True, wanted=NUMBER)
    assert TokenStore(prefix).numbers["weight"].tolist() == [0.5, 0.0, -1.0, 1.0]
    with refused("record-value-not-valid: it weighs the record in the loss") as caught:
        opened(prefix, tokenizer, tmp_path / "c")
    assert caught.value.what == f"{path}:2: weight is 0" and "2 documents" in caught.value.why


def test_numbers_are_part_of_the_cached_corpus(tmp_path, tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", *RECORDS[:2])
    wanted = WantedRecords(), NUMBER, WEIGHT, WantedRecords(numbers=("label",))
    keys = [cache_key([path], tokenizer, True, wanted=one) for one in wanted]
    assert len(set(keys)) == 4 and keys[0] == cache_key([path], tokenizer, True)
    plain = opened(path, tokenizer, tmp_path / "c", WantedRecords())
    weighed = opened(path, tokenizer, tmp_path / "c")
    assert plain[0].row_values == {} and np.array_equal(plain[0].tokens, weighed[0].tokens)
    prefix = plain.members[0].store.prefix
    with refused("corpus-without-numbers: the loss of this run reads them"):
        opened(prefix, tokenizer, tmp_path / "c")
    (store,) = (member.store for member in weighed.members)
    assert opened(store.prefix, tokenizer, tmp_path / "c")[0].row_values.keys() == {f"{RECORD}weight"}
    meta = json.loads((tmp_path / "c" / f"{store.prefix}.meta.json").read_text())
    assert meta["numbers"] == ["weight"] and ".numbers.bin" in meta["sha256"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"scor": 1}, "score is missing or null"),
        ({"score": float("nan")}, "score is not a number (NaN)"),
        ({"score": 1e-50}, "score is 1e-50, less than 1e-37"),
        ({"score": 10**400}, "more than 3e+38"),
    ],
    ids=["typo", "nan", "too small", "too large"],
)
def test_a_number_that_cannot_be_read_says_why(record, said):
    with pytest.raises(DataError) as raised:
        WantedRecords(numbers=("score",)).read_numbers({"text": "a", **record})
    assert raised.value.code == "record-value-not-valid" and said in str(raised.value)
    assert ("this record has scor" in str(raised.value)) == ("scor" in record)
