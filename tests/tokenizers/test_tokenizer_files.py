"""Folders whose tokenizer transformers rebuilds, and Kimi's rank files: ids are those of the files."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_changes import PlainTokenizer
from mkd.errors import UsageError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.kimi import PATTERN, read_ranks
from mkd.tokenizers.load import load_tokenizer
from mkd.tokenizers.pieces import byte_characters
from mkd.tokenizers.tokenizer_files import note_once, warn_of_export
from tests.reported import refused
from tests.tokenizers.trained import CHATML, SENTENCES, llama_tokenizer, train_hf_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(folder: Path, backend: Tokenizer, model_type: str | None, tokenizer_class: str, **config) -> str:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>", "chat_template": CHATML} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(folder)


def with_digits() -> Tokenizer:
    """Return byte-level BPE that merges digits, which Qwen's classes of transformers split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *alphabet, "20", "24", "2024"])}
    backend = Tokenizer(models.BPE(vocabulary, [("2", "0"), ("2", "4"), ("20", "24")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


@pytest.fixture
def notes(caplog):
    note_once.cache_clear()
    caplog.set_level(logging.WARNING, "mkd")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "mkd"]


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [("qwen2", "PreTrainedTokenizerFast"), ("llama", "Qwen2Tokenizer"), ("gemma3_text", "Qwen2Tokenizer")],
)
def test_tokenizer_json_decides(model_type, tokenizer_class, tmp_path, notes):
    backend = with_digits()
    folder = write(tmp_path / "model", backend, model_type, tokenizer_class)
    assert len(AutoTokenizer.from_pretrained(folder)("x 2024").input_ids) == 6  # transformers splits digits
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    assert tokenizer.encode("x 2024") == backend.encode("x 2024").ids and tokenizer.eos_id == 2
    conversation = Conversation([{"role": "user", "content": "2024"}, {"role": "assistant", "content": "a"}])
    ids, mask = tokenizer.apply_chat_template(conversation)
    assert backend.token_to_id("2024") in ids and sum(mask) == 2
    load_tokenizer("HuggingFaceTokenizer", folder)
    (note,) = [line for line in notes() if folder in line]
    assert "pre_tokenizer" in note and "Qwen2Tokenizer" in note
    assert pickle.loads(pickle.dumps(tokenizer)).encode("x 2024") == tokenizer.encode("x 2024")


REMOTE = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}


@pytest.mark.parametrize(
    ("tokenizer_class", "more"),
    [("T5Tokenizer", {}), ("ByT5Tokenizer", {}), ("Qwen2VLProcessor", {}), (5, {}), ("Own", REMOTE)],
)
def test_a_class_that_cannot_read_the_file_is_no_obstacle(tokenizer_class, more, tmp_path, notes):
    """It is of another family or kind, no class, or code of the folder's. Exports name the right one."""
    backend = with_digits()
    folder = write(tmp_path / "model", backend, "llama", tokenizer_class, **more)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    assert tokenizer.encode("x 2024") == backend.encode("x 2024").ids and tokenizer.eos_id == 2
    conversation = Conversation([{"role": "user", "content": "2024"}, {"role": "assistant", "content": "a"}])
    assert sum(tokenizer.apply_chat_template(conversation)[1]) == 2
    (note,) = notes()
    assert "cannot read it" in note and tokenizer.is_rebuilt
    PlainTokenizer().save(Path(folder))
    assert AutoTokenizer.from_pretrained(folder)("x 2024").input_ids == tokenizer.encode("x 2024")


def test_a_file_that_nobody_can_read_is_refused(tmp_path):
    folder = write(tmp_path / "model", with_digits(), "llama", "T5Tokenizer")
    (Path(folder) / "tokenizer.json").write_text('{"model": {}}')
    with refused("tokenizer-missing", UsageError):
        load_tokenizer("HuggingFaceTokenizer", folder)


def qwen2_backend() -> Tokenizer:
    backend = train_hf_tokenizer().backend_tokenizer
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return backend


def with_bos(backend: Tokenizer) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return backend


@pytest.mark.parametrize(
    ("make", "model_type", "tokenizer_class", "loaded"),
    [
        (qwen2_backend, "qwen2", "Qwen2Tokenizer", "Qwen2Tokenizer"),
        (qwen2_backend, "qwen3", "Qwen2TokenizerFast", "Qwen2Tokenizer"),
        (lambda: with_bos(qwen2_backend()), "qwen2", "LlamaTokenizerFast", "Qwen2Tokenizer"),
        (lambda: with_bos(with_digits()), "llama", "PreTrainedTokenizerFast", "TokenizersBackend"),
        (lambda: with_bos(with_digits()), "llama", "LlamaTokenizerFast", "TokenizersBackend"),
        (with_digits, "gpt_oss", "GPT2Tokenizer", "GPT2Tokenizer"),
        (with_digits, None, "PreTrainedTokenizerFast", "TokenizersBackend"),
    ],
)
def test_settings_that_give_the_same_ids_change_nothing(
    make, model_type, tokenizer_class, loaded, tmp_path, notes
):
    backend = make()
    folder = write(tmp_path / "model", backend, model_type, tokenizer_class)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    warn_of_export(folder)
    assert type(tokenizer._hf).__name__ == loaded and not notes()
    for text in SENTENCES[:4]:
        assert tokenizer.encode(text) == backend.encode(text).ids


def test_leading_blanks_of_llama_2(tmp_path, notes):
    """Its tokenizer.json puts a blank before every text, as SentencePiece does; transformers 5 not always."""
    hf = llama_tokenizer()
    hf.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    for text in ("the fox", " the fox", "  the\nfox"):
        assert tokenizer.encode(text) == hf.backend_tokenizer.encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path)(" the fox").input_ids != tokenizer.encode(" the fox")
    assert len(notes()) == 1


@pytest.mark.parametrize("adds_blank", [True, False])
def test_folders_of_a_sentencepiece_file_alone(adds_blank, tmp_path, notes):
    """transformers 5 leaves out the blank before the text, if it does not know the class."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_blank,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert len(notes()) == adds_blank
    if adds_blank:
        assert "SentencePieceTokenizer" in notes()[0] and str(tmp_path / "tokenizer.model") in notes()[0]


BASE = 380  # ranks
ENDS = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "[PAD]": 255}
KIMI_TEMPLATE = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def write_kimi(folder: Path) -> str:
    """Write a folder like Moonlight's: ranks learned from text, settings, and code that must not run."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BASE, initial_alphabet=alphabet, show_progress=False)
    texts = [*SENTENCES, " 2024 12345 \u4f60\u597d\u4e16\u754c DON'T we'll   \n\n aaaa"]
    backend.train_from_iterator(texts, trainer)
    table = byte_characters()
    ranks = {bytes(table[c] for c in piece): i for piece, i in backend.get_vocab().items()}
    assert len(ranks) == BASE
    folder.mkdir()
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    decoder = {BASE + i: {"content": token, "special": True} for token, i in ENDS.items()}
    config = {
        "added_tokens_decoder": decoder | {BASE + 10: {"content": "<|im_middle|>", "special": True}},
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "chat_template": KIMI_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_moonshot.py").write_text("raise AssertionError('code of a model has run')")
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    return str(folder)


def test_kimi_files_give_the_ids_of_tiktoken(tmp_path):
    folder = write_kimi(tmp_path / "moonlight")
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    ranks = read_ranks(Path(folder) / "tiktoken.model")
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    pool = [*SENTENCES[:4], " ", "  ", "\n", "a", "aa", "e\u0301", "=", "\u4f60\u597d", "12", "The", "don't"]
    pool += ["'S", "\u65e5\u672c\u306e", "\u0436", "\u0627", "\U0001f600", "\r\n", "...", "ab", "\u01c5"]
    generator = random.Random(0)
    for _ in range(1000):
        text = "".join(generator.choice(pool) * generator.choice([1, 1, 2, 3, 7]) for _ in range(8))
        assert tokenizer.encode(text) == encoding.encode_ordinary(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == BASE + 256 and tokenizer.vocabulary["<|reserved_token_385|>"] == 385
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.roles["end_of_turn"]) == (
        BASE + 1,
        BASE + 255,
        BASE + 2,
    )
    assert tokenizer.token_bytes[300] == next(token for token, rank in ranks.items() if rank == 300)


def test_kimi_conversations_and_exports(tmp_path):
    folder = write_kimi(tmp_path / "moonlight")
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    conversation = Conversation(
        [{"role": "user", "content": "The dog"}, {"role": "assistant", "content": "jumps"}]
    )
    ids, mask = tokenizer.apply_chat_template(conversation)
    text = (
        "<|im_user|>user<|im_middle|>The dog<|im_end|><|im_assistant|>assistant<|im_middle|>jumps<|im_end|>"
    )
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one]) == "jumps<|im_end|>"
    stops = tmp_path / "moonlight" / "generation_config.json"
    stops.write_text(json.dumps({"eos_token_id": [BASE + 1, BASE + 2]}))
    with_stops = load_tokenizer("HuggingFaceTokenizer", folder)
    assert with_stops.chat_fingerprint != tokenizer.chat_fingerprint == tokenizer.fingerprint
    stops.unlink()
    HFAssets(Path(folder), Path(folder)).copy_to(tmp_path / "out")
    again = load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "out"))
    assert again.fingerprint == tokenizer.fingerprint
    assert (tmp_path / "out" / "tokenization_moonshot.py").exists()


def test_other_rank_files_are_refused_by_name(tmp_path):
    folder = Path(write_kimi(tmp_path / "moonlight"))
    with refused("tokenizer-file-not-valid", UsageError) as caught:
        load_tokenizer("TiktokenTokenizer", str(folder / "tiktoken.model"))
    assert str(folder) in caught.value.do
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "QWenTokenizer"}))
    with refused("tokenizer-missing: and its tokenizer_class is", UsageError):
        load_tokenizer("HuggingFaceTokenizer", str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tiktoken.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with refused("tokenizer-file-not-valid: Git LFS pointer", UsageError):
        load_tokenizer("HuggingFaceTokenizer", str(folder))


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tekken.json", "tokenization_x.py"])
def test_files_of_tokenizers_that_are_not_read_are_named(tmp_path, name):
    (tmp_path / name).touch()
    with refused("tokenizer-missing: holds no tokenizer", UsageError) as caught:
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert name in caught.value.why and "write a tokenizer.json" in caught.value.do


def test_a_page_instead_of_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("<!DOCTYPE html>")
    with refused("tokenizer-file-not-valid: a page of HTML", UsageError):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_a_tokenizer_that_the_hub_cannot_be_asked_for_is_refused_at_once(tmp_path):
    """transformers by itself tries again for about a minute."""
    script = (  # time starts after the imports
        "import time; from mkd.errors import UsageError\n"
        "from mkd.tokenizers.load import load_tokenizer\n"
        "start = time.monotonic()\n"
        "try: load_tokenizer('HuggingFaceTokenizer', 'nobody/tokenizer')\n"
        "except UsageError as error: print(error.code, time.monotonic() - start)"
    )
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | hub, capture_output=True, text=True, timeout=120
    )
    code, seconds = done.stdout.split()
    assert code == "tokenizer-missing" and float(seconds) < 10, done.stderr
