"""Lazy character packing."""

from __future__ import annotations

import json

from mkd.data import encoding
from mkd.data.encoding import cut_texts, join_texts


def rows_of(*texts):
    return [(number, json.dumps({"text": text}).encode()) for number, text in enumerate(texts, 1)]


def joined(rows, characters):
    return [
        (number, row["text"] if isinstance(row, dict) else row)
        for number, row in join_texts(rows, characters)
    ]


def test_texts_are_joined_until_they_are_long_enough():
    assert joined(rows_of("abc", "de", "f", "ghijkl", "m"), 5) == [(1, "abc\nde"), (3, "f\nghijkl"), (5, "m")]
    assert joined(rows_of("abc", "de"), 6) == [(1, "abc\nde")], "the newline counts"
    assert joined(rows_of("abc", "de"), 1) == [(1, "abc"), (2, "de")]
    assert joined(rows_of("abc", "de"), 100) == [(1, "abc\nde")]
    assert joined([], 5) == []


def test_blank_lines_stay_inside_a_sample_and_blank_samples_go():
    assert joined(rows_of("a", "", "b"), 4) == [(1, "a\n\nb")]
    assert joined(rows_of("", " ", ""), 2) == []


def test_other_records_pass_and_end_a_sample():
    other, malformed = (2, b'{"prompt": "p", "completion": "c"}'), (4, b"{")
    rows = [*rows_of("a"), other, (3, {"text": b"caf\xc3\xa9"}), malformed, (5, {"text": "z"})]
    assert joined(rows, 9) == [(1, "a"), other, (3, "caf\u00e9"), malformed, (5, "z")]


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
