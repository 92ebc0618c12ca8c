"""Tokenised corpora: reading, damage, and token ids that a model does not know."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mkd.data import store as store_module
from mkd.data.store import TokenStore
from mkd.errors import DataError

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8]]
MASKS = [[0, 1, 0], [1], [], [0, 0, 1, 1]]


def test_documents_and_masks(make_store):
    store = make_store(DOCUMENTS, MASKS)
    assert store.lengths.tolist() == [3, 1, 0, 4] and len(store) == 4 and store.num_tokens == 8
    for index in range(4):
        ids, loss = store.document(index)
        assert (ids.tolist(), loss.tolist()) == (DOCUMENTS[index], MASKS[index])
    ids, loss = store.read(3, 1, 2)
    assert (ids.tolist(), loss.tolist()) == ([6, 7], [0, 1]) and (ids.dtype, loss.dtype) == (
        np.int64,
        np.uint8,
    )
    assert make_store(DOCUMENTS, name="plain").document(0)[1].tolist() == [1, 1, 1]


def test_sequences_of_one_megatron_document_are_one_document(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(5, 7), [2])
    builder.finalize(str(tmp_path / "c.idx"))
    store = TokenStore.open(str(tmp_path / "c"))
    assert [store.document(i)[0].tolist() for i in range(len(store))] == [[0, 1, 2, 3, 4], [5, 6]]


def test_arrays_outlive_the_store_and_pickling_reopens_it(make_store):
    store = make_store(DOCUMENTS, MASKS)
    pickled = pickle.dumps(store)
    ids, loss = store.document(3)
    lengths = store.lengths
    del store
    assert len(pickled) < 500
    assert ids.tolist() == [5, 6, 7, 8] and loss.tolist() == [0, 0, 1, 1] and lengths.tolist() == [3, 1, 0, 4]
    assert pickle.loads(pickled).document(3)[0].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("scan", [1, 3, 1 << 24])
def test_count_loss_reads_in_parts(make_store, monkeypatch, scan):
    monkeypatch.setattr(store_module, "SCAN_TOKENS", scan)
    random = np.random.default_rng(0)
    masks = [random.integers(0, 2, n) for n in random.integers(0, 9, 40)]
    store = make_store([np.zeros(len(mask)) for mask in masks], masks)
    counts = store.count_loss(store.offsets[:-1], store.lengths)
    assert counts.tolist() == [int(mask.sum()) for mask in masks]
    plain = make_store([np.zeros(len(mask)) for mask in masks], name="plain")
    assert plain.count_loss(store.offsets[:-1], store.lengths).tolist() == [len(mask) for mask in masks]


@pytest.mark.parametrize("scan", [2, 1 << 24])
@pytest.mark.parametrize(("token", "vocab_size"), [(8, 8), (-1, 100)])
def test_token_ids_out_of_range_name_the_document(make_store, monkeypatch, scan, token, vocab_size):
    monkeypatch.setattr(store_module, "SCAN_TOKENS", scan)
    store = make_store([[0, 1], [], [2], [3, token, 4]])
    with pytest.raises(DataError) as caught:
        store.check_token_range(vocab_size)
    assert caught.value.what.endswith(
        f"corpus.bin: document 3 has token id {token}, the model knows 0 to {vocab_size - 1}"
    )
    assert "another tokenizer" in caught.value.why and "preprocess_data.py" in caught.value.do


def test_token_ids_in_range(make_store):
    make_store(DOCUMENTS).check_token_range(9)


def test_description_saves_the_scan(make_store):
    prefix = make_store([[5]]).prefix
    Path(prefix + ".meta.json").write_text(json.dumps({"format_version": 1, "max_token_id": 3}))
    TokenStore.open(prefix).check_token_range(4)
    with pytest.raises(DataError, match="token id 5"):
        TokenStore.open(prefix).check_token_range(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: os.remove(p + ".idx"), "corpus.idx not found"),
        (
            lambda p: os.truncate(p + ".bin", 8),
            "corpus.bin is damaged or incomplete\n  why: it has 8 bytes where",
        ),
        (lambda p: os.truncate(p + ".bin", 0), "corpus.bin is empty"),
        (lambda p: os.truncate(p + ".idx", 20), "corpus.idx is damaged or incomplete"),
        (lambda p: os.truncate(p + ".idx", 60), "corpus.idx is damaged or incomplete"),
        (
            lambda p: Path(p + ".idx").write_bytes(b"x" * 99),
            "corpus.idx is damaged or incomplete\n  why: it does not start",
        ),
        (lambda p: os.truncate(p + ".loss_mask.bin", 7), "corpus.loss_mask.bin is damaged or incomplete"),
        (lambda p: Path(p + ".meta.json").write_text("{"), "corpus.meta.json is damaged or incomplete"),
        (lambda p: Path(p + ".meta.json").write_text("{}"), "this program reads format version 1"),
    ],
)
@pytest.mark.fault(27)
def test_damaged_files(make_store, damage, message):
    prefix = make_store(DOCUMENTS, MASKS).prefix
    damage(prefix)
    with pytest.raises(DataError) as caught:
        TokenStore.open(prefix)
    assert message in str(caught.value) and caught.value.why and caught.value.do


LENGTHS, POINTERS, DOCUMENTS_AT = 34, 50, 82  # where an index of four sequences has them, behind its header


def overwrite(path, place, value):
    """Write the array `value` into the bytes of a file from `place`."""
    content = bytearray(Path(path).read_bytes())
    content[place : place + value.nbytes] = value.tobytes()
    Path(path).write_bytes(content)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (LENGTHS, np.int32([-3, 7]), "sequence 0 has -3 tokens"),
        (LENGTHS, np.int32([1, 3]), "sequence 1 does not start where the one before it ends"),
        (LENGTHS, np.int32([2**31 - 1]), "sequence 1 does not start"),
        (POINTERS, np.int64([12, 0]), "sequence 0 does not start where"),
        (POINTERS + 24, np.int64([1 << 40]), "sequence 3 does not start where"),
        (POINTERS, np.int64([-4]), "sequence 0 does not start where"),
        (DOCUMENTS_AT, np.int64([1]), "documents do not ascend from 0"),
        (DOCUMENTS_AT + 8, np.int64([3, 1]), "documents do not ascend from 0"),
        (DOCUMENTS_AT + 32, np.int64([9]), "its documents do not add up to its sequences"),
        (17, np.uint8([7]), "its tokens are of type float32, and token ids are whole numbers"),
        (17, np.uint8([8]), "sequence 1 does not start where"),  # of 16 bits
        (17, np.uint8([99]), "it does not start as a Megatron index does"),
        (18, np.int64([5]), "bytes where its header says"),
        (18, np.int64([1 << 62]), "bytes where its header says"),
    ],
)
@pytest.mark.fault(27)
def test_an_index_that_is_wrong(make_store, place, value, why):
    prefix = make_store(DOCUMENTS).prefix
    overwrite(prefix + ".idx", place, value)
    with pytest.raises(DataError, match="corpus.* is damaged") as caught:
        TokenStore.open(prefix)
    assert why in caught.value.why and caught.value.do


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
@pytest.mark.fault(27)
def test_a_bin_file_of_another_size(make_store, change):
    prefix = make_store(DOCUMENTS).prefix
    os.truncate(prefix + ".bin", 32 + change)
    with pytest.raises(
        DataError, match=f"(?s)corpus.bin is damaged.*it has {32 + change} bytes where the index says 32"
    ):
        TokenStore.open(prefix)


def test_missing_loss_mask(make_store):
    prefix = make_store(DOCUMENTS).prefix
    Path(prefix + ".meta.json").write_text(json.dumps({"format_version": 1, "loss_mask": True}))
    with pytest.raises(DataError, match="written with a loss mask"):
        TokenStore.open(prefix)
