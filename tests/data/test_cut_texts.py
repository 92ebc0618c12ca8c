"""Huge texts are cut before they are tokenised."""

from __future__ import annotations

import json

from mkd.data.corpus import encoding
from mkd.data.corpus.encoding import cut_texts


def rows_of(*texts):
    return [(number, json.dumps({"text": text}).encode()) for number, text in enumerate(texts, 1)]


def test_huge_texts_are_cut_where_it_hurts_least(monkeypatch):
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 10)
    rows = rows_of("0123456789", "one\ntwo four six", "one two four six", "x" * 25, "\u4f60" * 12)
    cut = [
        (number, row["text"] if isinstance(row, dict) else json.loads(row)["text"])
        for number, row in cut_texts(rows)
    ]
    assert cut == [
        (1, "0123456789"),
        # The line end is in the first half: the cut is at the last blank before ten characters.
        *[(2, "one\ntwo"), (2, " four six")],
        *[(3, "one two"), (3, " four six")],
        *[(4, "x" * 10), (4, "x" * 10), (4, "x" * 5)],
        *[(5, "\u4f60" * 10), (5, "\u4f60" * 2)],
    ]
    assert list(cut_texts([(1, {"text": b"a b\nc d e f g h"})])) == [
        (1, {"text": "a b\nc d e"}),
        (1, {"text": " f g h"}),
    ]


def test_other_huge_records_pass(monkeypatch):
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 10)
    others = [
        b'{"prompt": "p", "completion": "c"}',
        b'{"text": "not closed',
        {"prompt": "x" * 99, "completion": "y"},
    ]
    rows = list(enumerate(others, 1))
    assert list(cut_texts(rows)) == rows
