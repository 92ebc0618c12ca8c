"""The relation of two vocabularies: common tokens, and the entries that the projection may and must have."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mkd.errors import UsageError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.vocabulary.relation import STAGES, ProjectionSettings, VocabularyRelation, build_relation
from tests.reported import refused
from tests.xtoken.small_tokenizers import byte_level, sentence_piece

SMALL_PAIRS = {
    "byte level <- SentencePiece": lambda: (byte_level(), sentence_piece()),
    "SentencePiece <- byte level": lambda: (sentence_piece(700), byte_level(900, reverse=True)),
}
REAL_PAIRS = [("qwen3", "mistral"), ("smollm2", "qwen3")]


def check_common(student: Tokenizer, teacher: Tokenizer, relation: VocabularyRelation) -> None:
    """Check that each byte string that both know is common once; the other common tokens are roles."""
    students, teachers = relation.pairs()
    assert (np.diff(students) > 0).all() and len(set(teachers.tolist())) == len(teachers)
    roles = {
        (student.roles[role], teacher.roles[role]) for role in student.roles.keys() & teacher.roles.keys()
    }
    found = set()
    for pair in zip(students.tolist(), teachers.tolist(), strict=True):
        if pair not in roles:
            assert student.token_bytes[pair[0]] == teacher.token_bytes[pair[1]] is not None
            found.add(student.token_bytes[pair[0]])
    assert found == (set(student.token_bytes) & set(teacher.token_bytes)) - {None, b""}
    assert {student.roles["eos"]: teacher.roles["eos"]}.items() <= dict(
        zip(students, teachers, strict=True)
    ).items()


def check_projection(student: Tokenizer, teacher: Tokenizer, relation: VocabularyRelation) -> None:
    """Check that rows are distributions or reported as empty.

    Every column shares bytes with its row: one contains the other.
    """
    matrix = relation.projection
    assert matrix.shape == (student.vocab_size, teacher.vocab_size) and matrix.values.dtype == np.float32
    filled = np.ones(student.vocab_size, bool)
    filled[matrix.empty_rows] = False
    sums = matrix.row_sums()
    np.testing.assert_allclose(sums[filled], 1.0, atol=1e-6)
    assert not sums[~filled].any() and np.isfinite(matrix.values).all() and (matrix.values > 0).all()
    roles = {
        (student.roles[role], teacher.roles[role]) for role in student.roles.keys() & teacher.roles.keys()
    }
    for row, column in zip(matrix.rows.tolist(), matrix.columns.tolist(), strict=True):
        if (row, column) not in roles:
            ours, theirs = student.token_bytes[row], teacher.token_bytes[column]
            assert ours in theirs or theirs in ours, (ours, theirs)


def check_beginnings(student: Tokenizer, teacher: Tokenizer, relation: VocabularyRelation) -> None:
    """Check that a token begins with its common token's text, a common one with itself; few have none."""
    students, teachers = relation.pairs()
    assert (relation.student_beginnings[students] == students).all()
    assert (relation.teacher_beginnings[teachers] == students).all()
    for tokenizer, starts in ((student, relation.student_beginnings), (teacher, relation.teacher_beginnings)):
        assert len(starts) == tokenizer.vocab_size and set(starts.tolist()) <= {-1, *students.tolist()}
        with_text = [i for i, own in enumerate(tokenizer.token_bytes) if own]
        found = [i for i in with_text if starts[i] >= 0]
        assert len(found) > 0.99 * len(with_text)
        for i in set(found) - set(students.tolist() if tokenizer is student else teachers.tolist()):
            assert tokenizer.token_bytes[i].startswith(student.token_bytes[starts[i]])


@pytest.mark.parametrize("pair", SMALL_PAIRS)
def test_small_tokenizers(pair):
    student, teacher = SMALL_PAIRS[pair]()
    relation = build_relation(student, teacher)
    check_common(student, teacher, relation)
    check_projection(student, teacher, relation)
    check_beginnings(student, teacher, relation)
    for s, t in zip(*relation.pairs(), strict=True):
        assert relation.projection.row(s) == {t: 1.0}
    expected = [
        i for i, own in enumerate(student.token_bytes) if own is None and i not in relation.common_student
    ]
    assert relation.projection.empty_rows.tolist() == expected  # byte tokens write everything


@pytest.mark.download
@pytest.mark.parametrize("pair", REAL_PAIRS)
def test_real_tokenizers(real_tokenizers, pair):
    student, teacher = (real_tokenizers[name] for name in pair)
    relation = build_relation(student, teacher)
    check_common(student, teacher, relation)
    check_projection(student, teacher, relation)
    check_beginnings(student, teacher, relation)
    assert not [i for i in relation.projection.empty_rows.tolist() if student.token_bytes[i] is not None]


def test_relaxed_pairs_come_on_top_and_stay_one_to_one():
    student, teacher = SMALL_PAIRS["byte level <- SentencePiece"]()
    relation = build_relation(student, teacher)
    students, teachers = relation.pairs(relaxed=True)
    assert (
        len(students)
        == len(relation.common_student) + len(relation.relaxed_student)
        > len(relation.common_student)
    )
    assert (np.diff(students) > 0).all() and len(set(teachers.tolist())) == len(teachers)
    strict = dict(zip(*(ids.tolist() for ids in relation.pairs()), strict=True))
    assert strict.items() < dict(zip(students.tolist(), teachers.tolist(), strict=True)).items()
    for s, t in zip(relation.relaxed_student, relation.relaxed_teacher, strict=True):
        ours, theirs = student.token_bytes[s].decode(), teacher.token_bytes[t].decode()
        assert ours != theirs and ours.strip().casefold() == theirs.strip().casefold()


def test_tokenizers_of_one_vocabulary_are_the_identity():
    for tokenizer in (byte_level(), sentence_piece()):  # the second has two ids for many bytes
        relation = build_relation(tokenizer, tokenizer)
        everything = np.arange(tokenizer.vocab_size)
        for ids in (*relation.pairs(), relation.projection.columns, relation.projection.rows):
            np.testing.assert_array_equal(ids, everything)
        assert (relation.projection.values == 1).all() and not len(relation.relaxed_student)


def test_stages_can_be_chosen():
    student, teacher = SMALL_PAIRS["byte level <- SentencePiece"]()
    whole = build_relation(student, teacher).projection
    for stages in (("exact",), ("multi",), ("special",), ("exact", "special"), ("multi", "cut"), STAGES[:3]):
        relation = build_relation(student, teacher, ProjectionSettings(stages, top_k=2))
        check_projection(student, teacher, relation)
        per_row = np.diff(relation.projection.offsets)
        filled = int((per_row > 0).sum())
        if "multi" not in stages:
            assert per_row.max() == 1 and filled <= len(relation.common_student)
        else:
            assert (per_row.max() <= 2) == ("cut" in stages)
    np.testing.assert_array_equal(np.diff(whole.offsets) > 0, np.diff(relation.projection.offsets) > 0)
    top = build_relation(student, teacher, ProjectionSettings(top_k=1)).projection
    assert np.diff(top.offsets).max() == 1 and (top.values == 1).all()


def alphabet_only(letters: str) -> Tokenizer:
    """Return a byte-level BPE whose vocabulary is these letters."""
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


def test_what_the_teacher_cannot_write_has_an_empty_row():
    relation = build_relation(alphabet_only("abcd"), alphabet_only("bd"))
    assert relation.projection.empty_rows.tolist() == [0, 2] and relation.common_student.tolist() == [1, 3]


def test_tokenizers_that_share_nothing_are_refused():
    with refused("tokenizers-differ: the tokenizers have no token in", UsageError):
        build_relation(alphabet_only("ab"), alphabet_only("cde"))


def test_a_tokenizer_that_loses_bytes_is_refused():
    with refused("tokenizer-missing: the bytes of the tokenizer's", UsageError):
        build_relation(byte_level(), word_piece())


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ({"stages": ()}, "value-not-valid: makes no projection matrix"),
        ({"stages": ("cut",)}, "value-not-valid: makes no projection matrix"),
        ({"stages": ("exact", "fuzzy")}, "value-not-valid: makes no projection matrix"),
        ({"top_k": 0}, "out-of-range: leaves no entry in a row"),
    ],
)
def test_settings_that_make_no_matrix_are_refused(bad, code):
    with refused(code, UsageError):
        ProjectionSettings(**bad)
