"""Relaxed pairs: which variants are paired, and which first."""

from __future__ import annotations

from mkd.xtoken.vocabulary.relation import relaxed_pairs


def pairs(student: list[str], teacher: list[str]) -> dict[str, str]:
    found = relaxed_pairs(
        {s.encode(): i for i, s in enumerate(student)}, {t.encode(): i for i, t in enumerate(teacher)}
    )
    return {student[s]: teacher[t] for s, t in found.items()}


def test_unicode_form_leading_space_and_case_are_ignored():
    assert pairs(["e\u0301", " dog", "Cat", "\uff11", "x"], ["\u00e9", "dog", " cat", "1", "y"]) == {
        "e\u0301": "\u00e9",
        " dog": "dog",
        "Cat": " cat",
        "\uff11": "1",
    }


def test_closer_variants_pair_first_and_each_token_once():
    assert pairs(["THE", "The"], [" the", " The", "tHe"]) == {"THE": " the", "The": " The"}
    assert pairs(["a", "A"], ["\uff41"]) == {"a": "\uff41"}
    assert pairs([" the", "The"], ["THE"]) == {" the": "THE"}  # of equally close ones the smaller id


def test_spaces_and_parts_of_characters_stay_unpaired():
    assert relaxed_pairs({b"  ": 0, b"\xe3": 1, b"\xe3\x81": 2}, {b" ": 0, b"   ": 1, b"\xe3\x82": 2}) == {}
