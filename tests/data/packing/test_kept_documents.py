"""Conversations longer than a pack: never an answer without its question, each one counted and listed."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest

from mkd.config.run_files import rule_for_conversations
from mkd.data import build
from mkd.data.corpus.store import StoreFiles
from mkd.data.dataset import BlendedDataset, PackedDataset, later_orders
from mkd.data.packing import pack_index
from mkd.data.packing.kept_documents import left_out_records
from mkd.data.packing.pack_index import Windows, pack_in_memory
from mkd.data.packing.pack_settings import PackSettings
from tests.data.datasets import open_datasets
from tests.data.pairs import STUDENT, TEACHER, open_pair, teacher_text
from tests.reported import refused

LENGTH = 12
OPTIONS = dict(seq_length=LENGTH, vocab_size=1000, pad_id=999)
# Lengths of question, answer, question, answer, ...
CONVERSATIONS = {
    "fits": (4, 8),
    "one turn": (9, 6),
    "long answer": (3, 12),
    "two turns": (5, 4, 3, 4),
    "cut in the first answer": (4, 6, 3, 5),
    "last question is long": (2, 2, 9, 5),
    "no answer": (30,),
}


def masked(*turns: int) -> list[int]:
    return [loss for place, length in enumerate(turns) for loss in [place % 2] * length]


@pytest.fixture
def corpus(make_store):
    """Return a corpus of the conversations, with a text of 30 tokens between each two."""
    masks = [mask for turns in CONVERSATIONS.values() for mask in (masked(*turns), [1] * 30)]
    starts = np.cumsum([0, *map(len, masks)])
    return make_store([range(s, s + len(mask)) for s, mask in zip(starts, masks, strict=False)], masks)


def kept(store, rule, overlong="split"):
    """Return name -> [(offset, length, labels with loss)] of the conversations' pieces; texts are "texts"."""
    dataset = PackedDataset(store, overlong=overlong, overlong_conversations=rule, **OPTIONS)
    pieces, found = dataset.index.pieces(0, dataset.index.num_pieces), {}
    for values in zip(pieces.document, pieces.offset, pieces.length, pieces.num_labels, strict=True):
        document, offset, length, labels = map(int, values)
        is_text, names = document % 2, list(CONVERSATIONS)
        loss = int(store.document(document)[1][offset + 1 : offset + 1 + labels].sum())
        found.setdefault("texts" if is_text else names[document // 2], []).append((offset, length, loss))
    assert sum(loss for of_one in found.values() for *_, loss in of_one) == dataset.num_loss_tokens
    return {name: sorted(of_one) for name, of_one in found.items()}, dataset


def test_what_is_kept_of_conversations_and_of_texts(corpus):
    texts = [piece for piece in [(0, 12, 12), (12, 12, 12), (24, 6, 5)] for _ in range(len(CONVERSATIONS))]
    by_rule = {rule: kept(corpus, rule)[0] for rule in ("drop", "truncate", "truncate-left", "split")}
    assert all(found.pop("texts") == texts for found in by_rule.values()), "texts are split as ever"
    fits = {"fits": [(0, 12, 8)]}
    assert by_rule["drop"] == fits
    assert by_rule["truncate-left"] == fits | {
        "one turn": [(3, 12, 6)],
        "two turns": [(9, 7, 4)],  # the last turn; the question of the first one does not fit whole
        "cut in the first answer": [(10, 8, 5)],
        "last question is long": [(6, 12, 5)],
    }
    assert by_rule["truncate"] == fits | {
        "one turn": [(0, 12, 3)],
        "long answer": [(0, 12, 9)],
        "two turns": [(0, 12, 4)],
        "cut in the first answer": [(0, 12, 6)],
        "last question is long": [(0, 12, 2)],
    }
    found, _ = kept(corpus, "split", overlong="drop")
    assert "texts" not in found and found["one turn"] == [(0, 12, 4), (12, 3, 2)]
    assert found == by_rule["split"], "the flag for texts does not change it"
    assert kept(corpus, "split", overlong="truncate")[0]["texts"] == [(0, 12, 11)] * len(CONVERSATIONS)


def test_the_default_never_splits_a_conversation():
    wanted = {"split": "drop", "drop": "drop", "truncate": "truncate"}
    assert {one: rule_for_conversations(one, None) for one in wanted} == wanted
    assert rule_for_conversations("drop", "split") == "split"


def test_sizes_of_the_start_are_those_after_the_rule(corpus):
    _, dataset = kept(corpus, "drop")
    (line,) = dataset.describe()
    total = dataset.num_loss_tokens + 6 + 12 + 8 + 11 + 7
    share = f"{(6 + 12 + 8 + 11 + 7) / total:.3f}"
    counted = "5 conversations longer than --seq-length left out with {} of the loss tokens ({} drop)"
    assert line.endswith(counted.format(share, "--overlong-conversations")), line
    _, dataset = kept(corpus, "truncate-left")
    (line,) = dataset.describe()
    assert "1 conversations longer than --seq-length left out" in line
    assert "4 conversations longer than --seq-length cut at the beginning" in line
    windows = PackSettings(LENGTH, overlong_conversations="drop", window_pieces=4)
    index = pack_in_memory(corpus, windows)
    assert len(list(Windows(corpus, windows))) > 3 and index.dropped.conversations == 5


def test_only_packs_that_earlier_versions_made_otherwise_have_another_fingerprint(corpus, make_store):
    def fingerprint(store, rule, overlong="split"):
        member = PackedDataset(store, overlong=overlong, overlong_conversations=rule, **OPTIONS)
        return later_orders(BlendedDataset([member]))

    short = make_store([range(9)] * 2, [masked(4, 5)] * 2, name="short")
    assert fingerprint(corpus, "drop") == {"overlong_conversations": "drop"}
    assert fingerprint(corpus, "split") == fingerprint(corpus, "truncate", "truncate") == {}
    assert fingerprint(short, "drop") == {}, "no conversation is too long"


@pytest.fixture
def records(write_jsonl):
    """Return a file of short and long records of three kinds; the long ones are in lines 2, 4 and 5."""
    ask = [{"role": "user", "content": "fox? " * 30}, {"role": "assistant", "content": "dog"}]
    return write_jsonl(
        "mixed.jsonl",
        {"text": "The quick brown fox " * 20},
        {"prompt": "fox " * 40, "completion": "dog"},
        {"prompt": "fox", "completion": "dog"},
        {"messages": ask},
        {"prompt": "fox", "completion": "dog " * 40},
    )


def listed(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_large_corpus_is_searched_for_what_is_left_out_only_if_its_packs_lack_something(
    records, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(pack_index, "SMALL_PIECES", 0)
    searched = mock.Mock(wraps=left_out_records)
    monkeypatch.setattr(build, "left_out_records", searched)
    options = dict(tokenizer=tokenizer, seq_length=32, vocab_size=350, cache_dir=str(tmp_path / "cache"))
    options |= dict(quarantine=str(tmp_path / "quarantine.jsonl"), data_path=[records])
    for rule, found in (("split", []), ("drop", [2, 4, 5])):
        open_datasets(**options, overlong_conversations=rule)
        assert [entry["line"] for entry in listed(tmp_path / "quarantine.jsonl")] == found
        assert searched.called == bool(found)


@pytest.mark.parametrize("split", [None, "3,2"])
def test_records_that_are_left_out_are_listed_with_their_lines(records, tokenizer, tmp_path, split):
    options = dict(tokenizer=tokenizer, seq_length=32, vocab_size=350, cache_dir=str(tmp_path / "cache"))
    options |= dict(quarantine=str(tmp_path / "quarantine.jsonl"))

    def lines(rule=None, **more):
        sets = open_datasets(data_path=[records], **options, overlong_conversations=rule, split=split, **more)
        found = listed(tmp_path / "quarantine.jsonl")
        assert {entry["file"] for entry in found} <= {records}
        return [entry["line"] for entry in found], found, sets

    if split:
        with refused(
            "longer-than-seq-length: documents are conversations longer"
        ) as caught:  # both held-out documents
            lines()
        assert caught.value.exit_code == 65 and records in caught.value.what and "2 of 2" in caught.value.what
    else:
        found, entries, (train, _) = lines()
        assert found == [2, 4, 5] and train.members[0].index.dropped.conversations == 3
        assert all("more than --seq-length 32" in entry["reason"] for entry in entries)
        assert train.num_documents == 5 and "3 conversations longer" in train.describe()[0]
    assert lines("truncate-left")[0] == [5], "its answer alone does not fit"
    assert lines("split")[0] == lines(overlong="truncate")[0] == []
    assert lines("split")[2][0].members[0].index.dropped.cut_conversations == (1 if split else 3)


def test_a_cache_without_places_is_made_again(records, tokenizer, tmp_path):
    options = dict(tokenizer=tokenizer, seq_length=500, vocab_size=350, cache_dir=str(tmp_path / "cache"))
    store = open_datasets(data_path=[records], **options)[0].members[0].store
    places = StoreFiles(store.prefix).places
    assert store.places(range(5)) == [(records, line) for line in range(1, 6)]
    written = places.read_bytes()
    places.unlink()
    assert store.places([3]) == [(f"{store.prefix}.bin", 4)], "a corpus of an earlier version"
    open_datasets(data_path=[records], **options)
    assert places.read_bytes() == written


def test_a_teacher_with_other_tokens_reads_the_same_records(write_jsonl, tmp_path):
    records = [{"prompt": "a question " * n, "completion": f" and its answer {n}"} for n in (2, 20, 3)]
    path = write_jsonl("a.jsonl", *records)

    def opened(rule):
        options = dict(seq_length=40, pack="none", overlong_conversations=rule)
        return open_pair(path, tmp_path, teacher_text(), **options)[0]

    left_out = opened("drop")
    assert [left_out.members[0].index.pieces_of(i).document.tolist() for i in (0, 1)] == [[0], [2]]
    assert len(left_out) == 2
    pack = opened("truncate-left")[1]
    theirs, ours = pack.teacher_inputs[0], STUDENT.encode_continuation(" and its answer 20")
    read = TEACHER.decode(theirs.tokens[: int(theirs.lengths[0])].tolist())
    assert "question a question  and its answer 20" in read and read.count("question") < 20
    assert pack.lengths.tolist() == [40] and pack.loss_mask.sum() == len(ours) + 1
    assert theirs.chunks.student_counts.sum() == pack.loss_mask.sum(), "every token of the answer is compared"
