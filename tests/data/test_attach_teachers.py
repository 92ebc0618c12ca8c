"""Teachers of all data sets of a run: one length of packs for each, in training and validation."""

from __future__ import annotations

import pytest

from mkd.data.batch import collate
from mkd.data.teacher_input import SharedTokens
from tests.data.datasets import open_datasets
from tests.data.pairs import COARSE, STUDENT, TEACHER, open_pair, teacher_text, texts
from tests.reported import refused


@pytest.fixture
def path(write_jsonl):
    return write_jsonl("texts.jsonl", *({"text": text} for text in texts()))


def needs(dataset):
    return [int(dataset[i].teacher_inputs[0].lengths.sum()) for i in range(len(dataset))]


def test_packs_are_as_long_as_the_longest_of_all_data_sets(path, tmp_path, write_jsonl):
    short = write_jsonl("short.jsonl", *({"text": text[:20]} for text in texts()))
    train, valid = open_pair(short, tmp_path, teacher_text(), valid_data_path=[path], pack="none")
    assert train.teacher_seq_lengths == valid.teacher_seq_lengths
    (length,) = valid.teacher_seq_lengths
    assert length % 64 == 0 and max(needs(train)) < length - 64 < max(needs(valid)) <= length
    packs = [pack for data in (train, valid) for pack in (data[0], data.empty_pack())]
    assert {int(pack.teacher_inputs[0].spans.sum()) for pack in packs} == {length}


def test_every_teacher_has_its_own(path, tmp_path):
    train, _ = open_pair(
        path,
        tmp_path,
        teacher_text(TEACHER),
        SharedTokens(),
        teacher_text(COARSE, seq_length=192),
        document_multiple=4,
    )
    assert train.teacher_seq_lengths[1:] == (64, 192) and train.teacher_seq_lengths[0] % 256 == 0
    batch = collate([train[0], train[1]])
    first, shared, last = batch.teacher_inputs
    assert (first.tokens.shape[1], last.tokens.shape[1]) == (2 * train.teacher_seq_lengths[0], 384)
    assert shared == SharedTokens() and shared.token_rows(batch) == (batch,)
    assert open_pair(path, tmp_path, SharedTokens())[0].teacher_seq_lengths == (64,)
    assert open_pair(path, tmp_path)[0].teacher_seq_lengths == ()


def test_a_length_that_documents_cannot_be_padded_to(path, tmp_path):
    with refused("length-not-divisible: is not a multiple of") as caught:
        open_pair(path, tmp_path, teacher_text(seq_length=100, name="qwen"), document_multiple=8)
    assert caught.value.do == "use 104"


def test_blends_of_files_and_corpora(path, tmp_path, write_jsonl, make_store):
    """Each member has a separate corpus of the teacher, with the same text in the tokens of both models."""
    store = make_store([STUDENT.encode(text) for text in texts(5)], name="tokens")
    train, _ = open_datasets(
        data_path=["1", path, "2", store.prefix],
        tokenizer=STUDENT,
        seq_length=64,
        vocab_size=STUDENT.vocab_size,
        cache_dir=str(tmp_path / "cache"),
        teachers=[teacher_text()],
    )
    assert len(train.members) == 2 and len(train.describe()) == 4
    last = train[len(train) - 1].teacher_inputs[0]
    assert len(last.chunks) and last.spans.sum() == train.teacher_seq_lengths[0]
