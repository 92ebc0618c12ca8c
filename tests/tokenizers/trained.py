"""Real tokenizers, trained in a moment."""

from __future__ import annotations

import base64
import io

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mkd.tokenizers.load import load_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A model predicts the next token of the same document.",
    "Questions have answers, and answers have reasons.",
    "Packing puts many short documents into one row.",
] * 5

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_hf_tokenizer(
    template=CHATML, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), vocab_size=350
):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=specials[0], pad_token=None)
    hf.chat_template = template
    return hf


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf_tokenizer")
    train_hf_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(hf_dir):
    return load_tokenizer("HuggingFaceTokenizer", hf_dir)


@pytest.fixture(scope="session")
def spm_file(tmp_path_factory):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=50, minloglevel=2
    )
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return str(path)


def llama_tokenizer():
    """Return a fast tokenizer like Llama 2's: a blank before the text, <0xNN> for unknown characters."""
    words = ["\u2581", *"the fox", "\u2581t", "he", "\u2581the", "\u2581f", "ox", "\u2581fox"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "f"), ("o", "x"), ("\u2581f", "ox")]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def write_ranks(folder):
    """Return a small rank file with the name of GPT-2's: the single bytes, then a few merges."""
    pieces = [bytes([byte]) for byte in range(256)] + [
        b"th",
        b"the",
        b" the",
        b"12",
        b"\xe4\xbd",
        b"\xe4\xbd\xa0",
    ]
    path = folder / "r50k_base.tiktoken"
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces))
    )
    return path
