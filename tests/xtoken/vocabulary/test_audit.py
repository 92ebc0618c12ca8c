"""The audit equals a count character by character."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tokenizers import processors

from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken import align_spans, build_projection
from mkd.xtoken.vocabulary.audit import CLASSES, DROPPED, KINDS, SPECIAL, Audit, audit
from tests.xtoken.small_tokenizers import SAMPLE, SOURCE, byte_level, sentence_piece, train_byte_level

TEXTS = [SAMPLE, "", "   ", "x", *(SOURCE[i : i + 700] for i in range(0, 21000, 700))]
EXAMPLES = {
    "letters": "aZ\u00e9\u0416",
    "digits": "7\u0663\u2167",
    "punctuation": "(_=+\u00bf\u201c",
    "CJK": "\u6570\u306f\u30e9\ud55c\uff21\u3002",
    "whitespace": " \n\t\u3000",
    "other": "\U0001f600\u2192\x00",
}


def audited(student: Tokenizer, teacher: Tokenizer, texts: list[str]) -> Audit:
    return audit(student, teacher, build_projection(student, teacher), texts)


def kinds_by_definition(student, teacher, text) -> tuple[Counter, Counter, Counter]:
    """Return the number of bytes, student tokens and teacher tokens of a text in chunks of each kind."""
    relation = build_projection(student, teacher)
    common = set(zip(*(ids.tolist() for ids in relation.pairs()), strict=True))
    ours, theirs = student.encode_spans(text), teacher.encode_spans(text)
    counts = Counter(), Counter(), Counter()
    for a, b, c, d in align_spans(ours, theirs).tolist():
        many = ("1" if b - a == 1 else "M") + "-" + ("1" if d - c == 1 else "N")
        if many == "1-1":
            many += " common" if (ours.ids[a], theirs.ids[c]) in common else " not common"
        for count, number in zip(counts, (ours.ends[b - 1] - ours.starts[a], b - a, d - c), strict=True):
            count[many] += int(number)
    for count, number in zip(counts, (len(text.encode()), len(ours), len(theirs)), strict=True):
        count["dropped"] = number - count.total()
    return counts


def counted(row: np.ndarray) -> Counter:
    return +Counter(dict(zip(KINDS, row.tolist(), strict=True)))


@pytest.mark.parametrize(
    "pair", [(byte_level, sentence_piece), (sentence_piece, byte_level), (byte_level, byte_level)]
)
def test_counts_follow_the_definition(pair):
    student, teacher = (kind() for kind in pair)
    expected = Counter(), Counter(), Counter()
    for text in TEXTS:
        for total, one in zip(expected, kinds_by_definition(student, teacher, text), strict=True):
            total.update(one)
    result = audited(student, teacher, TEXTS)
    found = result.num_bytes.sum(0), result.student_tokens.sum(0), result.teacher_tokens
    assert tuple(map(counted, found)) == tuple(+one for one in expected)
    assert result.num_texts == len(TEXTS)


def test_shares_add_up_to_one():
    shares = audited(byte_level(), sentence_piece(), TEXTS).shares()
    tables = [shares[name] for name in ("bytes", "student_tokens", "teacher_tokens", "bytes_of_class")]
    for table in (*tables, *shares["classes"].values()):
        assert sum(table.values()) == pytest.approx(1, abs=1e-12)
    assert shares["num_bytes"] == sum(len(text.encode()) for text in TEXTS)
    for kind in ("1-1 common", "1-N", "M-1", "M-N"):
        assert shares["bytes"][kind] > 0.01, kind


@pytest.mark.parametrize("name", EXAMPLES)
def test_classes_of_characters_and_tokens(name):
    text = EXAMPLES[name]
    result = audited(byte_level(), byte_level(), [text, f"  {text}"])
    blanks = 0 if name == "whitespace" else 2
    by_class = dict(zip(CLASSES, result.num_bytes.sum(1).tolist(), strict=True))
    assert (
        by_class[name] == 2 * len(text.encode()) + (2 - blanks)
        and sum(by_class.values()) == by_class[name] + blanks
    )
    tokens = dict(zip(CLASSES, result.student_tokens.sum(1).tolist(), strict=True))
    blank_tokens = tokens["whitespace"] if name != "whitespace" else 0
    assert tokens[name] and tokens[name] + blank_tokens == sum(tokens.values())


def test_one_vocabulary_is_common_everywhere():
    result = audited(byte_level(), byte_level(), TEXTS)
    assert result.shares()["bytes"] == {kind: float(kind == "1-1 common") for kind in KINDS}


def test_tokens_that_stand_for_no_text_are_special_and_dropped():
    with_bos = train_byte_level()
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    result = audited(HuggingFaceTokenizer(with_bos), sentence_piece(), TEXTS[4:])
    assert result.student_tokens[SPECIAL, DROPPED] == result.student_tokens[SPECIAL].sum() == len(TEXTS[4:])
    plain = audited(byte_level(), sentence_piece(), TEXTS[4:])
    np.testing.assert_array_equal(result.num_bytes, plain.num_bytes)


def test_an_empty_sample_has_no_shares_but_zeros():
    shares = audited(byte_level(), sentence_piece(), []).shares()
    assert shares["num_bytes"] == 0 and not any(shares["bytes"].values()) and not shares["classes"]


def test_the_table_shows_every_kind_and_class():
    result = audited(byte_level(), sentence_piece(), TEXTS)
    table = result.table()
    for name in (
        *KINDS,
        "all bytes",
        "student tokens",
        "teacher tokens",
        "letters",
        "digits",
        "CJK",
        "whitespace",
    ):
        assert name in table
    assert f"{result.shares()['bytes']['1-1 common']:.4f}" in table and f"{len(TEXTS)} texts" in table
