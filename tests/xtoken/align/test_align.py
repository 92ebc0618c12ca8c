"""Chunks of two tokenizations against a plain walk, on real tokenizers and on small ones."""

from __future__ import annotations

import random
import unicodedata
from itertools import permutations

import numpy as np
import pytest
from tokenizers import processors

from mkd.errors import DataError, UsageError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.spans import EncodedText
from mkd.xtoken import AlignedText, align, align_spans
from tests.reported import refused
from tests.tokenizers.trained import train_hf_tokenizer
from tests.xtoken.brute_force import check_chunks, check_spans, random_text, walk
from tests.xtoken.real_tokenizers import NAMES

PAIRS = list(permutations(NAMES, 2))


def spans(*ends, ids=None):
    """Return tokens of a text from the ends of their spans.

    A repeated end shares the span, None means no text.
    """
    starts, span, stops = [], (0, 0), []
    for end in ends:
        span = span if end is None or end == span[1] else (span[1], end)
        starts.append(-1 if end is None else span[0])
        stops.append(-1 if end is None else end)
    return EncodedText(
        np.arange(len(ends)) if ids is None else np.array(ids), np.array(starts), np.array(stops)
    )


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        (spans(3, 7), spans(3, 7), [[0, 1, 0, 1], [1, 2, 1, 2]]),
        (spans(3, 7), spans(1, 3, 7), [[0, 1, 0, 2], [1, 2, 2, 3]]),
        (spans(2, 4, 6), spans(1, 3, 6), [[0, 3, 0, 3]]),
        (spans(3, 3, 3, 5), spans(3, 5), [[0, 3, 0, 1], [3, 4, 1, 2]]),
        (spans(None, 3, 5, None), spans(3, 5), [[1, 2, 0, 1], [2, 3, 1, 2]]),
        (spans(3, 5), spans(3), [[0, 1, 0, 1]]),
        (spans(3, 5), spans(4), []),
        (spans(), spans(3), []),
        (spans(None), spans(None, None), []),
        (spans(0), spans(0, 0), []),
    ],
)
def test_spans_by_hand(student, teacher, expected):
    assert align_spans(student, teacher).tolist() == expected
    mirrored = [[c, d, a, b] for a, b, c, d in expected]
    assert align_spans(teacher, student).tolist() == mirrored
    assert align_spans(student, teacher).dtype == np.int64


def test_parts_that_start_apart_align_from_the_first_common_end():
    student = EncodedText(np.arange(3), np.array([0, 2, 4]), np.array([2, 4, 6]))
    teacher = EncodedText(np.arange(3), np.array([-1, 2, 4]), np.array([-1, 4, 6]))
    assert align_spans(student, teacher).tolist() == [[1, 2, 1, 2], [2, 3, 2, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_random_boundaries_against_the_walk(seed):
    generator = np.random.default_rng(seed)
    sides = [spans(*np.sort(generator.integers(1, 60, generator.integers(1, 60)))) for _ in range(2)]
    assert align_spans(*sides).tolist() == walk(*sides)


@pytest.mark.download
@pytest.mark.parametrize("seed", range(8))
def test_real_tokenizers_on_random_unicode(real_tokenizers, seed):
    generator = random.Random(seed)
    for text in (random_text(generator) for _ in range(40)):
        data = text.encode()
        encoded = {name: tokenizer.encode_spans(text) for name, tokenizer in real_tokenizers.items()}
        for name, one in encoded.items():
            assert one.ids.tolist() == real_tokenizers[name].encode(text)
            check_spans(one, data)
        for student, teacher in PAIRS:
            chunks = align_spans(encoded[student], encoded[teacher]).tolist()
            assert chunks == walk(encoded[student], encoded[teacher])
            check_chunks(chunks, encoded[student], encoded[teacher])
            assert bool(chunks) == (len(encoded[student]) > 0 and len(encoded[teacher]) > 0)
            assert not chunks or encoded[student].ends[chunks[-1][1] - 1] == len(data)


@pytest.mark.download
@pytest.mark.parametrize(("name", "form"), [("qwen3", "NFC"), ("gpt2", None), ("mistral", None)])
def test_spans_are_what_the_library_decodes(real_tokenizers, name, form):
    """The tokens up to a span's end decode to the text up to there; this does not use token bytes."""
    tokenizer, generator = real_tokenizers[name], random.Random(1)
    compared = 0
    for text in (random_text(generator) for _ in range(100)):
        data, encoded = text.encode(), tokenizer.encode_spans(text)
        characters = np.cumsum([len(character.encode()) for character in text])
        for end in np.intersect1d(encoded.ends, characters).tolist():
            prefix = data[:end].decode()
            expected = unicodedata.normalize(form, prefix) if form else prefix
            decoded = tokenizer.decode(encoded.ids[encoded.ends <= end].tolist())
            assert decoded == (expected.replace("\u2581", " ") if name == "mistral" else expected)
            compared += 1
    assert compared > 2000


@pytest.mark.download
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_chunks_decode_to_the_same_text(real_tokenizers, student, teacher):
    ours, theirs = real_tokenizers[student], real_tokenizers[teacher]
    text = (
        "Two  tokenizers met\tin 2024: \u4f60\u597d, "
        "\u041f\u0440\u0438\u0432\u0435\u0442 \U0001f600!\n\nx = 3.14159"
    )
    aligned = align(ours, theirs, text)
    texts = []
    for a, b, c, d in aligned.chunks.tolist():
        mine = b"".join(ours.token_bytes[i] for i in aligned.student_ids[a:b])
        other = b"".join(theirs.token_bytes[i] for i in aligned.teacher_ids[c:d])
        if not texts:
            # SentencePiece puts a blank before a text.
            mine, other = mine.removeprefix(b" "), other.removeprefix(b" ")
        assert mine == other
        texts.append(mine)
    assert b"".join(texts) == text.encode() and len(texts) > 20


@pytest.mark.download
def test_a_tokenizer_aligns_with_itself_one_to_one_and_is_found_by_path(real_tokenizers, tokenizer_paths):
    for name, tokenizer in real_tokenizers.items():
        # A folder takes seconds to read.
        path = tokenizer_paths[name] if tokenizer_paths[name].is_file() else tokenizer
        aligned = align(path, tokenizer, "Same \u4f60 text, 123 tokens.")
        n = np.arange(len(aligned.student_ids))
        assert np.array_equal(aligned.chunks, np.stack([n, n + 1, n, n + 1], axis=1))
        assert np.array_equal(aligned.student_ids, aligned.teacher_ids)


def with_bos_and_eos(bos, eos):
    hf = train_hf_tokenizer(specials=(eos, bos))
    hf.bos_token = bos
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        special_tokens=[(token, hf.convert_tokens_to_ids(token)) for token in (bos, eos)],
    )
    return HuggingFaceTokenizer(hf)


def test_bos_and_eos_pair_by_role_not_by_text():
    student, teacher = with_bos_and_eos("<s>", "</s>"), with_bos_and_eos("<begin>", "<end>")
    for text, tokens in (("", 0), ("fox", 2)):
        aligned = align(student, teacher, text)
        n = tokens + 2
        assert len(aligned.student_ids) == n and aligned.chunks.tolist() == [
            [i, i + 1, i, i + 1] for i in range(n)
        ]
    plain = HuggingFaceTokenizer(train_hf_tokenizer())
    assert align(student, plain, "fox").chunks.tolist() == [[i + 1, i + 2, i, i + 1] for i in range(2)]


def test_a_transformers_tokenizer_and_an_empty_text(tokenizer, hf_dir):
    aligned = align(train_hf_tokenizer(), hf_dir, "")
    assert (
        isinstance(aligned, AlignedText) and aligned.chunks.shape == (0, 4) and len(aligned.student_ids) == 0
    )
    assert np.array_equal(
        align(train_hf_tokenizer(), hf_dir, "a fox").chunks[:, 0], np.arange(len(tokenizer.encode("a fox")))
    )


def test_a_lone_surrogate_is_refused(tokenizer, spm_file):
    with refused("record-text-damaged: character", DataError):
        align(tokenizer, spm_file, "a\ud800b")


def test_an_unknown_mode_is_refused(tokenizer):
    with refused("value-unknown: alignment mode", UsageError):
        align(tokenizer, tokenizer, "fox", mode="bytes")


def test_a_tokenizer_that_loses_bytes_still_aligns_the_rest(tokenizer, spm_file):
    # Neither the ideographs nor the capitals are in the SentencePiece vocabulary.
    text = "The fox \u4f60\u597d, QUICK dog."
    lossy = open_tokenizer(spm_file)
    ours, theirs = tokenizer.encode_spans(text), lossy.encode_spans(text)
    assert lossy.roles["unk"] in theirs.ids
    check_spans(theirs, text.encode())
    chunks = align_spans(ours, theirs).tolist()
    assert chunks == walk(ours, theirs)
    check_chunks(chunks, ours, theirs)
    assert ours.ends[chunks[-1][1] - 1] == len(text.encode())
