"""Three small real tokenizers of different kinds and vocabularies.

They are trained in a second on the standard library's sources.
"""

from __future__ import annotations

import argparse
import inspect
import io
import textwrap
from functools import cache

import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.sentencepiece import SentencePieceTokenizer
from mkd.tokenizers.tokenizer import Tokenizer

SOURCE = inspect.getsource(argparse) + inspect.getsource(textwrap)
JAPANESE = "\u5f15\u6570\u306f\u6570\u5b57\u3067\u3059\u3002"  # "arguments are numbers."
SAMPLE = f"def parse(args):\n    return args[2023]  # {JAPANESE} The Parser, caf\u00e9 \U0001f600\n"


def train_byte_level(vocab_size: int = 900, reverse: bool = False) -> PreTrainedTokenizerFast:
    """Train byte-level BPE; with `reverse` on the other half of the sources, with other special tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>"] if reverse else ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_half(reverse), trainer)
    roles = (
        {"eos_token": specials[0]}
        if reverse
        else {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def train_sentence_piece(vocab_size: int = 900) -> bytes:
    """Return the `.model` file of a SentencePiece BPE with byte tokens, BOS, EOS and an unknown token."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_half(reverse=True)),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return model.getvalue()


@cache
def byte_level(vocab_size: int = 900, reverse: bool = False) -> Tokenizer:
    return HuggingFaceTokenizer(train_byte_level(vocab_size, reverse))


@cache
def sentence_piece(vocab_size: int = 900) -> Tokenizer:
    return SentencePieceTokenizer(
        sentencepiece.SentencePieceProcessor(model_proto=train_sentence_piece(vocab_size))
    )


def _half(reverse: bool) -> list[str]:
    lines = [*SOURCE.splitlines(), *[JAPANESE] * 20]
    return [line for line in lines[reverse::2] if line.strip()]
