"""Spans of tokens: exact if their bytes join to the text, else by the library's offsets."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import BertTokenizer

from mkd.errors import DataError, UsageError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.spans import byte_offsets, locate
from tests.reported import refused
from tests.tokenizers.trained import llama_tokenizer, train_hf_tokenizer, write_ranks


def placed(encoded):
    return list(zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True))


def normalizing(normalizer, trim_offsets=False):
    hf = train_hf_tokenizer()
    hf.backend_tokenizer.normalizer = normalizer
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=trim_offsets
    )
    return HuggingFaceTokenizer(hf)


@pytest.mark.parametrize(
    "text", ["The quick fox.", "caf\u00e9 \u4f60\u597d", "\U0001f600\0\t\n", "<|endoftext|>", ""]
)
def test_byte_level_tokens_are_exact_even_inside_characters(tokenizer, text):
    encoded = tokenizer.encode_spans(text)
    assert (
        encoded.ids.tolist() == tokenizer.encode(text) and encoded.ids.dtype == encoded.ends.dtype == np.int64
    )
    assert [text.encode()[start:end] for start, end in placed(encoded)] == [
        tokenizer.token_bytes[i] for i in encoded.ids
    ]


def test_a_blank_before_the_text_is_no_text(tokenizer):
    llama = HuggingFaceTokenizer(llama_tokenizer())
    names = {i: name for name, i in llama.vocabulary.items()}
    encoded = llama.encode_spans("the fox")
    assert [names[i] for i in encoded.ids.tolist()] == ["<s>", "\u2581the", "\u2581fox"]
    assert placed(encoded) == [(-1, -1), (0, 3), (3, 7)]
    assert placed(llama.encode_spans("the fox", continuation=True)) == [(0, 3), (3, 7)]
    # The blank before the text shares a span.
    assert placed(llama.encode_spans(" the")) == [(-1, -1), (0, 4), (0, 4)]
    assert placed(llama.encode_spans("\u4f60")) == [(-1, -1), (0, 1), (0, 1), (1, 2), (2, 3)]


def test_blanks_after_control_tokens_are_no_text():
    """Llama's tokenizers add such blanks in conversations.

    The bytes of a character keep separate spans there, too.
    """
    pieces = [b"</s>", b" fox", b" ", *(bytes([byte]) for byte in "\u4f60".encode())]
    data, ids = "fox</s>\u4f60 fox</s> fox".encode(), [1, 0, 2, 3, 4, 5, 1, 0, 1]
    encoded = locate(
        ids, np.ones(9, dtype=bool), pieces, data, lambda: pytest.fail("the pieces spell the text")
    )
    assert placed(encoded) == [(0, 3), (3, 7), (7, 8), (7, 8), (8, 9), (9, 10), (10, 14), (14, 18), (18, 22)]
    other = np.array([[0, 3], [3, 7]])
    assert placed(locate([1, 0], np.ones(2, dtype=bool), pieces, b"fax</s>", lambda: other)) == [
        (0, 3),
        (3, 7),
    ]


def test_sentencepiece_bytes_and_unknown_characters(spm_file):
    lossy = open_tokenizer(spm_file)
    text = "The fox \u4f60\u597d."
    encoded = lossy.encode_spans(text)
    spans = placed(encoded)
    assert encoded.ids.tolist() == lossy.encode(text) and lossy.roles["unk"] in encoded.ids
    assert spans[0][0] == 0 and spans[-1][1] == len(text.encode())
    assert (8, 14) in spans and spans[encoded.ids.tolist().index(lossy.roles["unk"])][1] == 14


def test_a_composed_character_keeps_all_its_bytes():
    """The library's span of a composed character covers its first code point only."""
    tokenizer = normalizing(normalizers.NFC())
    text = "ae\u0301 e\u0301\u4f60 \u1100\u1161"
    encoded = tokenizer.encode_spans(text)
    ends = sorted({end for _, end in placed(encoded)})
    assert ends == [1, 4, 5, 8, 11, 12, 18]
    for end in ends:
        ids = encoded.ids[encoded.ends <= end].tolist()
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text.encode()[:end].decode())


def test_lower_casing_that_changes_the_length_of_characters():
    tokenizer = normalizing(normalizers.Lowercase())
    text = "\u0130X THE fox"  # its lower case has one code point more
    encoded = tokenizer.encode_spans(text)
    for end in {end for _, end in placed(encoded)}:
        assert (
            tokenizer.decode(encoded.ids[encoded.ends <= end].tolist())
            == text.encode()[:end].decode().lower()
        )


def test_trimmed_offsets_never_cut_a_blank_off_its_token():
    exact, trimmed = (
        normalizing(normalizers.Lowercase()),
        normalizing(normalizers.Lowercase(), trim_offsets=True),
    )
    text = "The quick  Fox \n jumps over the lazy Dog. "
    ends = {end for _, end in placed(exact.encode_spans(text))}
    found = {end for _, end in placed(trimmed.encode_spans(text))}
    assert found <= ends and len(found) > len(ends) // 2


def test_characters_that_are_dropped_belong_to_the_token_before():
    tokenizer = normalizing(normalizers.Replace("#", ""))
    assert placed(tokenizer.encode_spans("#a##b##")) == [(0, 4), (4, 7)]


def test_dropped_blanks_belong_to_the_token_after():
    pieces = [b"foo", b"bar", None]
    encoded = locate(
        [2, 0, 1], np.array([True] * 3), pieces, b"x foo bar", lambda: np.array([[0, 1], [2, 5], [6, 9]])
    )
    assert placed(encoded) == [(0, 1), (1, 5), (5, 9)]


def test_offsets_that_overlap_share_a_span():
    offsets = np.array([[0, 2], [1, 3], [3, 3], [3, 5], [5, 5]])
    encoded = locate(range(5), np.ones(5, dtype=bool), [None] * 5, b"abcde", lambda: offsets)
    assert placed(encoded) == [(0, 3), (0, 3), (3, 5), (3, 5), (3, 5)]


def test_offsets_in_bytes():
    text = "a\u00e9\u4f60\U0001f600b"
    assert byte_offsets(text, [(0, 1), (1, 2), (2, 4), (4, 5)]).tolist() == [
        [0, 1],
        [1, 3],
        [3, 10],
        [10, 11],
    ]
    assert byte_offsets("", []).shape == (0, 2)


def test_rank_files(tmp_path):
    pytest.importorskip("tiktoken")
    tokenizer = open_tokenizer(write_ranks(tmp_path))
    encoded = tokenizer.encode_spans("the the\u4f60\u597d")
    assert encoded.ids.tolist() == [257, 258, 261, 0xE5, 0xA5, 0xBD]
    assert placed(encoded) == [(0, 3), (3, 7), (7, 10), (10, 11), (11, 12), (12, 13)]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "tiktoken"])
def test_a_lone_surrogate_is_refused(kind, tokenizer, spm_file, tmp_path):
    if kind == "tiktoken":
        pytest.importorskip("tiktoken")
    other = {"byte level": lambda: tokenizer, "sentencepiece": lambda: open_tokenizer(spm_file)}
    subject = other.get(kind, lambda: open_tokenizer(write_ranks(tmp_path)))()
    with refused("record-text-damaged: character", DataError):
        subject.encode_spans("ab\udc00")


def test_a_tokenizer_whose_tokens_have_no_known_bytes_is_refused():
    bert = HuggingFaceTokenizer(
        BertTokenizer(vocab={"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4, "fox": 5})
    )
    with refused("tokenizer-missing: the bytes of the tokenizer's", UsageError):
        bert.encode_spans("fox")
