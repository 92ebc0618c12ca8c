"""Untrusted tokenizers and texts: code in a folder is never run, control tokens in a text stay text."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest
import sentencepiece

from mkd.errors import UsageError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import load_tokenizer
from mkd.tokenizers.tokenizer_files import rebuilt_example
from tests.reported import Reported
from tests.tokenizers.trained import SENTENCES, llama_tokenizer, write_ranks


@pytest.mark.parametrize("own_class", ["Remote", "PreTrainedTokenizerFast"])
@pytest.mark.fault(32)
def test_code_of_a_folder_is_not_run(hf_dir, tmp_path, own_class, monkeypatch):
    """`auto_map` names a class in a file of the folder; importing it would leave a mark.

    Nobody is asked whether it may run: a `y` on stdin changes nothing.
    """
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    folder, mark = shutil.copytree(hf_dir, tmp_path / "model"), tmp_path / "was run"
    (folder / "remote.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Remote: ...\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["remote.Remote", "remote.Remote"]},
        "tokenizer_class": own_class,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "remote", "auto_map": {"AutoConfig": "remote.Remote"}})
    )
    try:
        ids = load_tokenizer("HuggingFaceTokenizer", str(folder)).encode("The fox")
    except UsageError as error:
        assert Reported.of(error) == "tokenizer-file-not-valid: transformers refuses"
    else:
        assert ids == load_tokenizer("HuggingFaceTokenizer", hf_dir).encode("The fox")
    assert rebuilt_example(str(folder)) is None
    assert not mark.exists()


def hugging_face(hf_dir, tmp_path):
    return load_tokenizer("HuggingFaceTokenizer", hf_dir)


def llama(hf_dir, tmp_path):
    return HuggingFaceTokenizer(llama_tokenizer())


def sentence_piece(hf_dir, tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=320,
        minloglevel=2,
        model_type="bpe",
        byte_fallback=True,
        control_symbols=["<|im_start|>", "<|im_end|>"],
    )
    (tmp_path / "s.model").write_bytes(model.getvalue())
    return load_tokenizer("SentencePieceTokenizer", str(tmp_path / "s.model"))


def tiktoken(hf_dir, tmp_path):
    pytest.importorskip("tiktoken")
    return load_tokenizer("TiktokenTokenizer", str(write_ranks(tmp_path)))


@pytest.mark.parametrize("open_one", [hugging_face, llama, sentence_piece, tiktoken])
@pytest.mark.fault(26)
def test_control_tokens_in_a_text_are_text(open_one, hf_dir, tmp_path):
    tokenizer = open_one(hf_dir, tmp_path)
    control = sorted(tokenizer.special_tokens - {"<unk>"})
    assert control
    around = {*tokenizer.encode("a")} & {
        tokenizer.vocabulary[string] for string in control
    }  # BOS, where it is configured
    for text in (*control, f"x{control[0]}y", "".join(control)):
        ids = tokenizer.encode(text)
        added = [i for i in ids if i in {tokenizer.vocabulary[string] for string in control}]
        assert len(added) == len(around), f"{text!r} became {ids}"
        assert tokenizer.decode([i for i in ids if i not in around]).strip() == text
        assert not {tokenizer.vocabulary[string] for string in control} & {
            *tokenizer.encode_continuation(text)
        }
