"""All kinds of tokenizer, their fingerprints, and the differences between two tokenizers."""

from __future__ import annotations

import pickle
import shutil

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from mkd.errors import DataError, UsageError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import load_tokenizer
from tests.reported import refused
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

TEXTS = [
    "The quick brown fox.",
    "",
    " two  spaces\n\nand lines ",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "x" * 3000,
]


@pytest.mark.parametrize("text", TEXTS)
def test_hf_ids_are_those_of_transformers(tokenizer, hf_dir, text):
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(hf_dir)(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hf_special_ids(tokenizer):
    assert tokenizer.eos_id == tokenizer.pad_id == tokenizer.vocabulary["<|endoftext|>"]
    assert tokenizer.vocab_size == max(tokenizer.vocabulary.values()) + 1 == len(tokenizer.vocabulary)


def test_pad_token_is_used_where_there_is_one():
    hf = train_hf_tokenizer()
    hf.pad_token = "<|im_end|>"
    assert HuggingFaceTokenizer(hf).pad_id == hf.convert_tokens_to_ids("<|im_end|>")


def test_control_tokens_in_a_document_are_plain_text(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b<|endoftext|>")
    assert not {tokenizer.vocabulary["<|im_end|>"], tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == "a<|im_end|>b<|endoftext|>"


def test_bos_only_where_the_tokenizer_configures_it(tokenizer):
    hf = train_hf_tokenizer(specials=("<|endoftext|>", "<s>"))
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", hf.convert_tokens_to_ids("<s>"))]
    )
    with_bos = HuggingFaceTokenizer(hf)
    assert with_bos.encode("fox")[0] == hf.convert_tokens_to_ids("<s>")
    assert with_bos.encode_continuation("fox") == with_bos.encode("fox")[1:]
    assert tokenizer.encode_continuation("fox") == tokenizer.encode("fox")


def test_truncation_of_the_tokenizer_file_is_ignored():
    hf = train_hf_tokenizer()
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=8)
    assert len(HuggingFaceTokenizer(hf).encode("x" * 100)) == 100
    assert len(HuggingFaceTokenizer(hf).encode("x")) == 1


def test_sentencepiece(spm_file):
    tokenizer = load_tokenizer("SentencePieceTokenizer", spm_file)
    ids = tokenizer.encode("The quick brown fox.")
    assert tokenizer.decode(ids) == "The quick brown fox."
    assert tokenizer.vocab_size == 50 and tokenizer.eos_id == 2 and tokenizer.pad_id == 2
    assert 1 not in ids and 2 not in ids  # neither BOS nor EOS
    assert tokenizer.special_tokens == {"<unk>", "<s>", "</s>"}
    with refused("chat-template-missing", DataError):
        tokenizer.apply_chat_template(Conversation([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_fingerprint_survives_use_pickling_and_moving(kind, hf_dir, spm_file, tmp_path):
    tokenizer = load_tokenizer(kind, hf_dir if kind.startswith("H") else spm_file)
    moved = tmp_path / "moved"
    (shutil.copytree if kind.startswith("H") else shutil.copy)(
        hf_dir if kind.startswith("H") else spm_file, moved
    )
    tokenizer.encode("The fox")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert tokenizer.fingerprint == copy.fingerprint == load_tokenizer(kind, str(moved)).fingerprint
    assert copy.encode("The fox") == tokenizer.encode("The fox")


def test_fingerprint_sees_template_and_vocabulary(tokenizer):
    assert HuggingFaceTokenizer(train_hf_tokenizer()).fingerprint == tokenizer.fingerprint
    assert (
        HuggingFaceTokenizer(train_hf_tokenizer(template=CHATML + " ")).fingerprint != tokenizer.fingerprint
    )
    assert HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=340)).fingerprint != tokenizer.fingerprint


def test_same_family_has_no_difference(tokenizer):
    hf = train_hf_tokenizer(template=None)
    hf.add_special_tokens({"additional_special_tokens": ["<|tool|>", "<|pad|>"]})
    sibling = HuggingFaceTokenizer(hf)
    assert sibling.vocab_size == tokenizer.vocab_size + 2
    assert tokenizer.vocabulary_difference(sibling) is None
    assert sibling.vocabulary_difference(tokenizer) is None
    assert sibling.vocabulary_fingerprint == tokenizer.vocabulary_fingerprint


def test_difference_names_first_ids_and_sizes(tokenizer, spm_file):
    other = load_tokenizer("SentencePieceTokenizer", spm_file)
    difference = other.vocabulary_difference(tokenizer)
    assert difference.startswith("id 3: '\u2581' here, '!' there; id 4: 'h' here, ")
    assert difference.endswith(f"; 50 and {tokenizer.vocab_size} entries") and "\n" not in difference
    assert other.vocabulary_fingerprint != tokenizer.vocabulary_fingerprint


def test_a_longer_base_vocabulary_is_a_difference(tokenizer):
    shorter = HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=tokenizer.vocab_size - 2))
    last = tokenizer.vocab_size - 2
    assert f"id {last}: nothing here, '" in shorter.vocabulary_difference(tokenizer)
    assert "here, nothing there" in tokenizer.vocabulary_difference(shorter)


def test_a_shared_special_token_under_another_id_is_a_difference(tokenizer):
    swapped = HuggingFaceTokenizer(
        train_hf_tokenizer(specials=("<|endoftext|>", "<|im_end|>", "<|im_start|>"))
    )
    assert tokenizer.vocabulary_difference(swapped).startswith(
        "id 1: '<|im_start|>' here, '<|im_end|>' there"
    )


@pytest.mark.parametrize(
    ("kind", "model", "code"),
    [
        ("GPT2BPETokenizer", "x", "value-unknown: --tokenizer-type"),
        ("HuggingFaceTokenizer", "EMPTY", "tokenizer-missing: no tokenizer"),
        ("SentencePieceTokenizer", "missing.model", "path-not-found: --tokenizer-model"),
        ("SentencePieceTokenizer", "JUNK", "tokenizer-file-not-valid: is not a SentencePiece model"),
    ],
)
def test_errors_of_loading(kind, model, code, tmp_path):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "JUNK").write_text("version https://git-lfs.github.com/spec/v1")
    with refused(code, UsageError):
        load_tokenizer(kind, str(tmp_path / model))
