"""Packs hold whole images within both capacities; long documents end after an answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import build_store
from mkd.data.dataset import PackedDataset
from mkd.data.images.image_packing import ImageRoom
from mkd.data.images.image_table import patches_of
from mkd.data.packing.pack_index import PackIndex, pack_into_file
from mkd.data.packing.pack_settings import PackSettings
from tests.data.datasets import open_datasets
from tests.data.images.test_conversation import asked, data_uri
from tests.data.images.tiny_processors import image_file, picture
from tests.reported import refused

SEQ_LENGTH = 160


def question(*sizes, text="what is it?"):
    images = (data_uri(image_file(picture(*size))) for size in sizes)
    return asked(*images, text=text)["messages"]


@pytest.fixture
def corpus(reader, write_jsonl, tmp_path):
    """Return (image reader, store): dialogs of one to three turns, with and without images, and texts."""
    images, rng, records = reader(), np.random.default_rng(0), []
    for _ in range(40):
        sizes = [tuple(rng.integers(8, 60, 2).tolist()) for _ in range(int(rng.integers(0, 3)))]
        turns = [question(*sizes, text="why? " * int(rng.integers(1, 9)))]
        turns += [question(*sizes[:1]) for _ in range(int(rng.integers(0, 3)))]
        records.append({"messages": sum(turns, [])})
        records.append({"text": "the quick brown fox " * int(rng.integers(1, 30))})
    path, prefix = write_jsonl("a.jsonl", *records), str(tmp_path / "out" / "c")
    build_store([path], prefix, images.processor.tokenizer, True, images=images)
    return images, TokenStore(prefix)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
@pytest.mark.parametrize("max_patches", [None, 300])
def test_packs_hold_whole_images_within_both_capacities(corpus, overlong, max_patches, tmp_path):
    images, store = corpus
    settings = PackSettings(SEQ_LENGTH, overlong=overlong, document_multiple=2, max_patches=max_patches)
    index = PackIndex.in_file(pack_into_file(store, settings, str(tmp_path), KnownFiles(None)))
    table, seen, cut = store.images.between(0, len(store)), 0, 0
    for pack in range(len(index)):
        pieces = index.pieces_of(pack)
        assert (-(-pieces.length // 2) * 2).sum() <= SEQ_LENGTH
        assert (
            max_patches is None
            or ImageRoom(store, SEQ_LENGTH, max_patches).patches_in(pieces).sum() <= max_patches
        )
        for document, offset, length in zip(pieces.document, pieces.offset, pieces.length, strict=True):
            own = table[table["document"] == document]
            if not len(own):
                continue
            inside = own["first"] < length
            assert offset == 0 and (own["first"] + own["tokens"] <= length)[inside].all()
            seen += int(inside.sum())
            if length < store.lengths(int(document)):
                _, loss = store.read(int(document), 0, int(length) + 1)
                assert loss.tolist()[-2:] == [1, 0] and overlong != "drop"
                cut += 1
    assert 0 < seen < len(table), "some images fit, and some do not"
    assert (cut > 0) == (overlong != "drop")


def test_an_image_beyond_a_pack_drops_its_document_or_ends_it_before(reader, write_jsonl, tmp_path):
    images = reader()
    wide, narrow = question((60, 60)), question((16, 16))
    records = [{"messages": wide}, {"messages": narrow + wide}, {"messages": narrow}]
    prefix = str(tmp_path / "out" / "c")
    build_store([write_jsonl("a.jsonl", *records)], prefix, images.processor.tokenizer, True, images=images)
    store = TokenStore(prefix)
    lengths = store.lengths_between(0, 3)
    patches = patches_of(store.images.between(0, 3)).tolist()
    assert patches == [256, 16, 256, 16]
    short = lengths[2] - 1  # the line end after the last answer has no loss
    for seq_length, most in ((60, None), (1000, 100)):
        room = ImageRoom(store, seq_length, most)
        assert room.kept_lengths(0, lengths, "split").tolist() == [0, short, lengths[2]]
        assert room.kept_lengths(0, lengths, "drop").tolist() == [0, 0, lengths[2]]
    assert ImageRoom(store, 1000, 260).kept_lengths(1, lengths[1:], "split").tolist() == [short, lengths[2]]
    only_wide = str(tmp_path / "wide" / "c")
    path = write_jsonl("b.jsonl", records[0])
    build_store([path], only_wide, images.processor.tokenizer, True, images=images)
    with refused("corpus-without-loss-tokens"):
        PackedDataset(TokenStore(only_wide), vocab_size=400, pad_id=0, seq_length=60, images=images)


@pytest.mark.parametrize("in_file", [False, True])
def test_documents_without_room_are_counted_by_reason(reader, write_jsonl, tmp_path, in_file):
    images = reader()
    wide, narrow, text = question((60, 60)), question((16, 16)), {"text": "the quick brown fox " * 40}
    records = [{"messages": one} for one in (wide, narrow + wide, wide, narrow)]
    long = {"messages": question((16, 16), text="why? " * 200)}
    prefix, tokenizer = str(tmp_path / "out" / "c"), images.processor.tokenizer
    path = write_jsonl("a.jsonl", *records, long, text)
    build_store([path], prefix, tokenizer, True, images=images)
    store, known = TokenStore(prefix), dict(vocab_size=400, pad_id=0, images=images)

    def described(overlong, max_patches, seq_length=160):
        settings = dict(seq_length=seq_length, overlong=overlong, max_patches=max_patches)
        packed = pack_into_file(store, PackSettings(**settings), str(tmp_path), KnownFiles(None))
        index = PackIndex.in_file(packed) if in_file else None
        (line,) = PackedDataset(store, **known, **settings, index=index).describe()
        return line.partition(", documents dropped: ")[2]

    patches, tokens = "beyond --max-patches-per-pack", "beyond --seq-length"
    assert described("split", None) == f"1 {tokens}"
    assert described("split", 200) == f"2 {patches}, 1 {tokens}"
    assert described("drop", 200) == f"3 {patches}, 2 {tokens}"
    assert described("split", 300, seq_length=2000) == ""
    with refused("corpus-without-loss-tokens") as caught:
        described("drop", 4)
    assert f"documents dropped: 4 {patches}, 2 {tokens}" in caught.value.report()


def test_a_corpus_with_images_needs_the_processor_that_made_it(corpus, reader, tmp_path):
    images, store = corpus
    options = dict(tokenizer=images.processor.tokenizer, seq_length=SEQ_LENGTH, vocab_size=400)
    options |= dict(data_path=[store.prefix], cache_dir=str(tmp_path / "cache"))
    with refused("images-not-read: has images, and a model of this"):
        open_datasets(**options)
    images.processor.backend.size = {"shortest_edge": 64, "longest_edge": 1024}
    with refused("corpus-of-another-model: another image processor"):
        open_datasets(**options, images=images)


def test_texts_have_the_same_packs_with_a_limit_of_patches(make_store):
    store = make_store([range(1, 5 + i % 7) for i in range(50)])
    packs = [
        [index.pieces_of(i) for i in range(len(index))]
        for index in (
            PackedDataset(store, vocab_size=20, pad_id=0, seq_length=16, max_patches=most).index
            for most in (None, 4)
        )
    ]
    for one, other in zip(*packs, strict=True):
        assert one.document.tolist() == other.document.tolist()
    assert PackSettings(16).identity.keys() == PackSettings(16, max_patches=4).identity.keys() - {
        "max_patches"
    }


@pytest.mark.parametrize(
    "rule, kept, dropped, cut",
    [("drop", 1, 2, 0), ("truncate-left", 1, 2, 0), ("truncate", 2, 1, 1), ("split", 2, 1, 1)],
)
def test_the_rule_for_conversations_holds_for_images(rule, kept, dropped, cut, reader, write_jsonl, tmp_path):
    """One that may be cut ends after the last answer that fits; it is never cut from the left or split."""
    images, wide, narrow = reader(), question((60, 60)), question((16, 16))
    path = write_jsonl("a.jsonl", *({"messages": one} for one in (wide, narrow + wide, narrow)))
    listed, tokenizer = tmp_path / "quarantine.jsonl", images.processor.tokenizer
    options = dict(tokenizer=tokenizer, vocab_size=400, cache_dir=str(tmp_path / "cache"), images=images)
    options |= dict(seq_length=60, overlong_conversations=rule, quarantine=str(listed))
    dataset, _ = open_datasets(data_path=[path], **options)
    pieces, found = dataset.members[0].index.pieces(0, 9), dataset.members[0].index.dropped
    assert len(pieces) == kept and not pieces.offset.any()
    assert (found.conversations, found.cut_conversations, found.too_long) == (dropped, cut, 0)
    lines = [json.loads(line)["line"] for line in listed.read_text().splitlines()]
    assert lines == ([1, 2] if dropped == 2 else [1])
