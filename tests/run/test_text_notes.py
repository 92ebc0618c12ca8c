"""Notes about text that comes twice, and about text that is long for a model."""

from __future__ import annotations

from dataclasses import replace

from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.run.text_notes import text_notes
from tests.data.conftest import make_store  # noqa: F401  a fixture
from tests.plan.shapes import STUDENT

SETTINGS = dict(seq_length=16, vocab_size=100, pad_id=0)


def blended(*stores, **settings):
    return BlendedDataset([PackedDataset(store, **SETTINGS, **settings) for store in stores])


def said(training, held_out=None, **sizes):
    return list(text_notes(training, held_out, [("student", replace(STUDENT, **sizes))]))


def test_text_that_comes_twice(make_store):  # noqa: F811
    first, second = (make_store([[1, 2, 3], [4, 5, 6, 7]], name=name) for name in "ab")
    assert said(blended(first, second), blended(second)) == [
        f"note: the held-out text {second.prefix} is training text too: held-out figures do not show "
        "what the student only remembers"
    ]
    (note,) = said(blended(first, first))
    assert note.startswith(f"note: two paths of --data-path ({first.prefix}) are the same text")
    for one in (first, second):
        one.meta["cache_key"] = "of the same records"
    assert len(said(blended(first, second), blended(first))) == 3


def test_parts_of_a_split_are_other_text(make_store):  # noqa: F811
    store = make_store([[1, 2, 3], [4, 5, 6, 7], [8, 9]])
    assert said(blended(store, documents=(0, 2)), blended(store, documents=(2, 3))) == []
    assert len(said(blended(store, documents=(0, 2)), blended(store, documents=(1, 3)))) == 1


def test_text_that_is_long_for_a_model(make_store):  # noqa: F811
    store = make_store([[1, 2, 3], [4, 5, 6, 7]])
    assert said(blended(store), max_position_embeddings=4) == []
    (note,) = said(blended(store), max_position_embeddings=3)
    assert note.startswith("note: the longest text in a pack has 4 tokens, the student was made for 3")
