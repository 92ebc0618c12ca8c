"""Tokenizers behind one small interface: Hugging Face `tokenizer.json` and SentencePiece `.model`."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

from mkd.errors import DataError, UsageError
from mkd.tokenizers.chat import encode_chat


class Tokenizer(ABC):
    """Text to ids and back. Instances can be pickled, so that worker processes get the very same tokenizer."""

    eos_id: int | None  # None when the tokenizer has no end-of-sequence token
    pad_id: int  # what fills packs: the tokenizer's padding token, else EOS, else 0

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of one document: BOS only where the tokenizer's own configuration adds it.

        Control tokens spelled out in `text` stay plain text as far as the library can do that.
        """

    @abstractmethod
    def encode_continuation(self, text: str) -> list[int]:
        """The ids of text that follows other text: as `encode`, never with BOS or EOS."""

    @abstractmethod
    def apply_chat_template(self, messages: Sequence[Mapping]) -> tuple[list[int], list[int]]:
        """(ids of the template, loss mask): 1 on assistant turns and their end-of-turn token, 0 elsewhere.

        Raises DataError for a conversation that the template refuses or that cannot be masked.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""

    @property
    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """Every string of the tokenizer, added and control tokens included -> its id."""

    @property
    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """Strings that were added to the base vocabulary or only steer the model."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 over all that decides the ids of a text or of a conversation; the key of token caches."""

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1: the rows that an embedding needs at least."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def vocabulary_fingerprint(self) -> str:
        """SHA-256 over the base vocabulary alone: the same for tokenizers of one family."""
        base = sorted(item for item in self.vocabulary.items() if item[0] not in self.special_tokens)
        return _sha256(base)

    def vocabulary_difference(self, other: Tokenizer) -> str | None:
        """None if ids mean the same to both, else one line that names the first differences.

        A string that both know must have one id, and a base string of one must be known to the other. Additional
        special tokens, padding and chat templates do not count: models of one family differ in them.
        """
        mine, theirs = self.vocabulary, other.vocabulary
        differing = [
            *(mine[s] for s in mine if s not in self.special_tokens or s in theirs if theirs.get(s) != mine[s]),
            *(theirs[s] for s in theirs if s not in other.special_tokens and s not in mine),
        ]
        if not differing:
            return None
        here, there = ({i: s for s, i in vocabulary.items()} for vocabulary in (mine, theirs))
        first = [f"id {i}: {_shown(here, i)} here, {_shown(there, i)} there" for i in sorted(set(differing))[:3]]
        return "; ".join([*first, f"{len(mine)} and {len(theirs)} entries"])


class HuggingFaceTokenizer(Tokenizer):
    """A fast transformers tokenizer, called through its Rust backend: single texts start no thread pool,
    which would make every later fork of a data loader worker print a warning."""

    def __init__(self, hf):
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_id = hf.eos_token_id
        self.pad_id = next((i for i in (hf.pad_token_id, hf.eos_token_id) if i is not None), 0)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True).ids

    def encode_continuation(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False).ids

    def apply_chat_template(self, messages: Sequence[Mapping]) -> tuple[list[int], list[int]]:
        if self._hf.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template",
                "a record with messages needs one to become tokens",
                "use the tokenizer of an instruction-tuned model, or records with prompt and completion",
            )
        return encode_chat(self._hf, messages)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def fingerprint(self) -> str:
        return _sha256([self._backend.to_str(), self.eos_id, self._hf.chat_template])

    def _encode(self, text: str, add_special_tokens: bool):
        self._backend.encode_special_tokens = True  # "split_special_tokens": control tokens in the text are text
        return self._backend.encode(text, add_special_tokens=add_special_tokens)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file. It configures no BOS, so none is added."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor):
        self._processor = processor
        self.eos_id = processor.eos_id() if processor.eos_id() >= 0 else None
        self.pad_id = next((i for i in (processor.pad_id(), processor.eos_id()) if i >= 0), 0)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text)

    def apply_chat_template(self, messages: Sequence[Mapping]) -> tuple[list[int], list[int]]:
        raise DataError(
            "a SentencePiece tokenizer has no chat template",
            "a record with messages needs one to become tokens",
            "use --tokenizer-type HuggingFaceTokenizer with the model's folder, or records with prompt and completion",
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        ids = list(range(self._processor.get_piece_size()))
        return dict(zip(self._processor.id_to_piece(ids), ids, strict=True))

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        kinds = (self._processor.is_control, self._processor.is_unknown, self._processor.is_unused)
        return frozenset(s for s, i in self.vocabulary.items() if any(kind(i) for kind in kinds))

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._processor.serialized_model_proto()).hexdigest()


def load_tokenizer(tokenizer_type: str, tokenizer_model: str) -> Tokenizer:
    """The tokenizer of `--tokenizer-type` and `--tokenizer-model`: a local folder, a Hugging Face id, or a `.model` file.

    Raises UsageError when it cannot be loaded. Code that comes with a model is never run.
    """
    loaders = {"HuggingFaceTokenizer": _load_hugging_face, "SentencePieceTokenizer": _load_sentencepiece}
    if tokenizer_type not in loaders:
        raise UsageError(
            f"--tokenizer-type {tokenizer_type} is not known",
            do=f"use one of {', '.join(loaders)}",
        )
    return loaders[tokenizer_type](tokenizer_model)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model's folder holds a tokenizer: transformers makes up an empty one where there is none."""
    return any((Path(folder) / name).exists() for name in TOKENIZER_FILES)


def _load_hugging_face(model: str) -> Tokenizer:
    if Path(model).is_dir() and not has_tokenizer(model):
        raise UsageError(
            f"{model} holds no tokenizer",
            f"none of {', '.join(TOKENIZER_FILES)} is there",
            "copy the tokenizer's files into the folder, or name another one with --tokenizer-model",
        )
    try:
        hf = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UsageError(
            f"--tokenizer-model {model}: no Hugging Face tokenizer could be loaded",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}",
            "give a folder with tokenizer.json and tokenizer_config.json, or the id of a model on the Hub",
        ) from error
    if not hf.is_fast:
        raise UsageError(
            f"--tokenizer-model {model}: {type(hf).__name__} is not a fast tokenizer",
            "loss masks of conversations need the character offsets that only tokenizer.json based tokenizers give",
            "convert it to tokenizer.json with transformers, or use --tokenizer-type SentencePieceTokenizer",
        )
    return HuggingFaceTokenizer(hf)


def _load_sentencepiece(model: str) -> Tokenizer:
    if not Path(model).is_file():
        raise UsageError(
            f"--tokenizer-model {model} is not a file",
            "--tokenizer-type SentencePieceTokenizer reads one SentencePiece .model file",
            "give the path of the .model file, or use --tokenizer-type HuggingFaceTokenizer for a folder",
        )
    try:
        return SentencePieceTokenizer(sentencepiece.SentencePieceProcessor(model_file=model))
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"--tokenizer-model {model} is not a SentencePiece model",
            str(error),
            "check that the file is complete and not a Git LFS pointer",
        ) from error


def _sha256(content) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _shown(strings: Mapping[int, str], token_id: int) -> str:
    return repr(strings[token_id]) if token_id in strings else "nothing"
