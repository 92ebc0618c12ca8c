"""The bytes of tokens, the ids with a role, and the spelling of a fragment."""

from __future__ import annotations

import pickle
import sys

import pytest

from mkd.errors import DataError, UsageError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import load_tokenizer, open_tokenizer
from mkd.tokenizers.pieces import byte_characters, split_valid
from tests.reported import refused
from tests.tokenizers.trained import llama_tokenizer, train_hf_tokenizer, write_ranks

FRAGMENTS = [
    b"the",
    b" the",
    b"  the",
    b"\n",
    b"\xe4\xbd\xa0",
    b"\xe4\xbd",
    b"\xa0 the",
    b"\0",
    b"12 fox",
    b"<|endoftext|>",
]


@pytest.fixture(params=["byte level", "llama", "tiktoken"])
def lossless(request, tmp_path):
    """Return tokenizers that can spell any bytes."""
    if request.param == "tiktoken":
        pytest.importorskip("tiktoken")
        return open_tokenizer(write_ranks(tmp_path))
    return HuggingFaceTokenizer(train_hf_tokenizer() if request.param == "byte level" else llama_tokenizer())


def test_the_table_of_byte_level_bpe():
    table = byte_characters()
    assert (
        sorted(table.values()) == list(range(256))
        and table["\u0120"] == 0x20
        and table["\u010a"] == 0x0A
        and table["A"] == 0x41
    )


def test_byte_level(tokenizer):
    pieces = tokenizer.token_bytes
    assert len(pieces) == tokenizer.vocab_size and pieces[tokenizer.eos_id] is None
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)
    assert tokenizer.vocabulary["\u0120the"] == pieces.index(b" the")


def test_added_tokens_are_text_unless_they_are_special():
    hf = train_hf_tokenizer()
    hf.add_tokens(["<think>"])
    hf.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer = HuggingFaceTokenizer(hf)
    pieces = {string: tokenizer.token_bytes[i] for string, i in tokenizer.vocabulary.items()}
    assert pieces["<think>"] == b"<think>" and pieces["<|tool|>"] is None and pieces["<|im_end|>"] is None
    assert tokenizer.spell(b"<think>") == (tokenizer.vocabulary["<think>"],)


def test_metaspace():
    tokenizer = HuggingFaceTokenizer(llama_tokenizer())
    pieces = {string: tokenizer.token_bytes[i] for string, i in tokenizer.vocabulary.items()}
    assert (
        pieces["\u2581the"] == b" the"
        and pieces["<0xE4>"] == b"\xe4"
        and pieces["<unk>"] is pieces["<s>"] is None
    )
    assert tokenizer.roles == {"bos": 1, "eos": 2, "unk": 0}


def test_sentencepiece(spm_file):
    tokenizer = load_tokenizer("SentencePieceTokenizer", spm_file)
    assert tokenizer.token_bytes[:4] == (None, None, None, b" ") and tokenizer.roles == {
        "unk": 0,
        "bos": 1,
        "eos": 2,
    }
    assert b"".join(tokenizer.token_bytes[i] for i in tokenizer.spell(b"the fox")) == b"the fox"
    assert tokenizer.spell(b" fox") == tuple(tokenizer.encode("fox"))
    # This vocabulary has no byte tokens.
    assert tokenizer.spell("\u4f60".encode()) is None and tokenizer.spell(b"\xe4") is None


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_spellings_join_to_the_fragment(lossless, fragment):
    ids = lossless.spell(fragment)
    assert b"".join(lossless.token_bytes[i] for i in ids) == fragment


def test_every_token_can_be_spelled(lossless):
    for piece in filter(None, lossless.token_bytes):
        assert b"".join(lossless.token_bytes[i] for i in lossless.spell(piece)) == piece
    assert lossless.spell(b"") is None


def test_a_fragment_begins_no_word():
    tokenizer = HuggingFaceTokenizer(llama_tokenizer())
    assert tokenizer.spell(b" the") == (tokenizer.vocabulary["\u2581the"],)
    assert tokenizer.spell(b"the") == (tokenizer.vocabulary["t"], tokenizer.vocabulary["he"])


def test_runs_of_text_and_single_bytes():
    assert split_valid(b"a\xe4\xbd\xa0\xe4\xbdb") == ["a\u4f60", b"\xe4", b"\xbd", "b"]
    assert split_valid(b"") == []


def test_roles_of_a_chat_model(tokenizer):
    assert tokenizer.roles == {"eos": tokenizer.eos_id, "end_of_turn": tokenizer.vocabulary["<|im_end|>"]}
    assert "end_of_turn" not in HuggingFaceTokenizer(train_hf_tokenizer(template=None)).roles
    assert (
        "end_of_turn"
        not in HuggingFaceTokenizer(train_hf_tokenizer(template="{{ raise_exception('no') }}")).roles
    )


def test_rank_files(tmp_path):
    pytest.importorskip("tiktoken")
    path = write_ranks(tmp_path)
    tokenizer = load_tokenizer("TiktokenTokenizer", str(path))
    assert (
        tokenizer.encode("the the 12") == [257, 258, 0x20, 259] and tokenizer.decode([257, 258]) == "the the"
    )
    assert (
        tokenizer.eos_id == tokenizer.pad_id == tokenizer.roles["eos"] == 50256
        and tokenizer.vocab_size == 50257
    )
    assert tokenizer.token_bytes[:256] == tuple(bytes([byte]) for byte in range(256))
    assert tokenizer.token_bytes[50256] is tokenizer.token_bytes[300] is None
    assert tokenizer.vocabulary["<|endoftext|>"] == 50256 and tokenizer.special_tokens == {"<|endoftext|>"}
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint and copy.encode("the") == [257]
    assert 50256 not in tokenizer.encode("<|endoftext|>")
    with refused("chat-template-missing", DataError):
        tokenizer.apply_chat_template(Conversation([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("mine.tiktoken", b"", "tokenizer-file-not-valid"),
        (
            "r50k_base.tiktoken",
            b"version https://git-lfs.github.com/spec/v1\n",
            "tokenizer-file-not-valid: Git LFS pointer",
        ),
    ],
)
def test_rank_files_that_cannot_be_read(tmp_path, name, content, code):
    pytest.importorskip("tiktoken")
    (tmp_path / name).write_bytes(content)
    with refused(code, UsageError):
        open_tokenizer(tmp_path / name)


def test_rank_files_need_their_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with refused("package-missing: needs the package tiktoken", UsageError):
        open_tokenizer(write_ranks(tmp_path))


def test_open_tokenizer(tokenizer, hf_dir, spm_file):
    assert open_tokenizer(tokenizer) is tokenizer
    assert (
        open_tokenizer(hf_dir).fingerprint
        == open_tokenizer(train_hf_tokenizer()).fingerprint
        == tokenizer.fingerprint
    )
    assert open_tokenizer(spm_file).vocab_size == 50
