"""Tokenised corpora: reading, damage, and token ids that a model does not know."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mkd.data.corpus import store as store_module
from mkd.data.corpus.store import TokenStore
from tests.reported import refused

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8]]
MASKS = [[0, 1, 0], [1], [], [0, 0, 1, 1]]


def test_a_token_without_a_row_is_named_with_its_record(make_store):
    store = make_store(DOCUMENTS, MASKS)
    store.meta |= {"cache_key": "of records"}
    with refused("token-beyond-vocabulary: the record has token id 7") as caught:
        store.check_token_range(7)
    assert caught.value.what.startswith(f"{store.prefix}.bin:4: ") and "row" in caught.value.why


def test_documents_and_masks(make_store):
    store = make_store(DOCUMENTS, MASKS)
    assert (
        store.lengths_between(0, len(store)).tolist() == [3, 1, 0, 4]
        and len(store) == 4
        and store.num_tokens == 8
    )
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
    store = TokenStore(str(tmp_path / "c"))
    assert [store.document(i)[0].tolist() for i in range(len(store))] == [[0, 1, 2, 3, 4], [5, 6]]


def test_arrays_outlive_the_store_and_pickling_reopens_it(make_store):
    store = make_store(DOCUMENTS, MASKS)
    pickled = pickle.dumps(store)
    ids, loss = store.document(3)
    lengths = store.lengths_between(0, 4)
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
    counts = store.count_loss(store.starts(slice(0, -1)), store.lengths_between(0, len(store)))
    assert counts.tolist() == [int(mask.sum()) for mask in masks]
    plain = make_store([np.zeros(len(mask)) for mask in masks], name="plain")
    assert plain.count_loss(store.starts(slice(0, -1)), store.lengths_between(0, len(store))).tolist() == [
        len(mask) for mask in masks
    ]


@pytest.mark.parametrize("scan", [2, 1 << 24])
@pytest.mark.parametrize(("token", "vocab_size"), [(8, 8), (-1, 100)])
def test_token_ids_out_of_range_name_the_document(make_store, monkeypatch, scan, token, vocab_size):
    monkeypatch.setattr(store_module, "SCAN_TOKENS", scan)
    store = make_store([[0, 1], [], [2], [3, token, 4]])
    with refused("token-beyond-vocabulary: the model knows 0 to") as caught:
        store.check_token_range(vocab_size)
    assert caught.value.what.endswith(
        f"corpus.bin: document 3 has token id {token}, the model knows 0 to {vocab_size - 1}"
    )


def test_token_ids_in_range(make_store):
    make_store(DOCUMENTS).check_token_range(9)


def test_description_saves_the_scan(make_store):
    prefix = make_store([[5]]).prefix
    Path(prefix + ".meta.json").write_text(json.dumps({"format_version": 1, "max_token_id": 3}))
    TokenStore(prefix).check_token_range(4)
    with refused("token-beyond-vocabulary: the model knows 0 to"):
        TokenStore(prefix).check_token_range(3)


@pytest.mark.parametrize(
    ("end", "damage", "code"),
    [
        (".idx", os.remove, "data-path-not-found: not found"),
        (".bin", lambda path: os.truncate(path, 8), "corpus-damaged: is damaged or incomplete"),
        (".bin", lambda path: os.truncate(path, 0), "corpus-damaged: is empty"),
        (".idx", lambda path: os.truncate(path, 20), "corpus-damaged: is damaged or incomplete"),
        (".idx", lambda path: os.truncate(path, 60), "corpus-damaged: is damaged or incomplete"),
        (".idx", lambda path: path.write_bytes(b"x" * 99), "corpus-damaged: is damaged or incomplete"),
        (".loss_mask.bin", lambda path: os.truncate(path, 7), "corpus-damaged: is damaged or incomplete"),
        (".meta.json", lambda path: path.write_text("{"), "corpus-damaged: is damaged or incomplete"),
        (".meta.json", lambda path: path.write_text("{}"), "corpus-damaged: is damaged or incomplete"),
    ],
)
@pytest.mark.fault(27)
def test_damaged_files(make_store, end, damage, code):
    path = Path(make_store(DOCUMENTS, MASKS).prefix + end)
    damage(path)
    with refused(code) as caught:
        TokenStore(str(path).removesuffix(end))
    assert path.name in caught.value.what


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
        (POINTERS + 16, np.int64([1 << 40]), "sequence 2 does not start where"),
        (POINTERS + 24, np.int64([1 << 40]), "bytes where the index says"),
        (POINTERS, np.int64([-4]), "sequence 0 does not start where"),
        (DOCUMENTS_AT, np.int64([1]), "documents do not ascend from 0"),
        (DOCUMENTS_AT + 8, np.int64([3, 1]), "documents do not ascend from 0"),
        (DOCUMENTS_AT + 32, np.int64([9]), "its documents do not add up to its sequences"),
        (17, np.uint8([7]), "its tokens are of type float32, and token ids are whole numbers"),
        (17, np.uint8([8]), "bytes where the index says"),  # of 16 bits
        (17, np.uint8([99]), "it does not start as a Megatron index does"),
        (18, np.int64([5]), "bytes where its header says"),
        (18, np.int64([1 << 62]), "bytes where its header says"),
    ],
)
@pytest.mark.fault(27)
def test_an_index_that_is_wrong(make_store, place, value, why):
    prefix = make_store(DOCUMENTS).prefix
    overwrite(prefix + ".idx", place, value)
    with refused("corpus-damaged: is damaged or incomplete") as caught:
        TokenStore(prefix).check_layout()
    assert why in caught.value.why


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
@pytest.mark.fault(27)
def test_a_bin_file_of_another_size(make_store, change):
    prefix = make_store(DOCUMENTS).prefix
    os.truncate(prefix + ".bin", 32 + change)
    with refused("corpus-damaged: is damaged or incomplete") as caught:
        TokenStore(prefix)
    assert "corpus.bin" in caught.value.what


def test_missing_loss_mask(make_store):
    prefix = make_store(DOCUMENTS).prefix
    Path(prefix + ".meta.json").write_text(json.dumps({"format_version": 1, "loss_mask": True}))
    with refused("corpus-damaged: is damaged or incomplete"):
        TokenStore(prefix)
