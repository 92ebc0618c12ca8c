"""Rank files of tiktoken (`*.tiktoken`): byte-level BPE; the file lists no special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from mkd.errors import DataError, UsageError
from mkd.tokenizers.kimi import RANKS_FILE
from mkd.tokenizers.tokenizer import Tokenizer

ENDOFTEXT = "<|endoftext|>"


@dataclass(frozen=True)
class _Encoding:
    """Parts of a tokenizer that a rank file lacks; source: tiktoken_ext/openai_public.py of tiktoken 0.14."""

    pattern: str
    special: Mapping[str, int]


_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
    r"""|\s+(?!\S)|\s"""
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"""[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    rf"""|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
ENCODINGS = {
    "r50k_base": _Encoding(_WORDS, {ENDOFTEXT: 50256}),
    "p50k_base": _Encoding(_WORDS, {ENDOFTEXT: 50256}),
    "cl100k_base": _Encoding(
        _CL100K,
        {ENDOFTEXT: 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
        | {"<|endofprompt|>": 100276},
    ),
    "o200k_base": _Encoding(_O200K, {ENDOFTEXT: 199999, "<|endofprompt|>": 200018}),
}


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding. It has no BOS, so none is added; <|endoftext|> is EOS."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.eos_id = self.pad_id = encoding.eot_token

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """String -> id; tokens that are not UTF-8 are written with lone surrogates for their bytes."""
        pieces = ((i, piece) for i, piece in enumerate(self.token_bytes) if piece)
        return {piece.decode("utf-8", "surrogateescape"): i for i, piece in pieces} | self._special

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self._special)

    @cached_property
    def vocab_size(self) -> int:
        return self._encoding.n_vocab

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        pieces: list[bytes | None] = [None] * self.vocab_size
        for piece in self._encoding.token_byte_values():
            pieces[self._encoding.encode_single_token(piece)] = piece
        return tuple(pieces)

    @cached_property
    def roles(self) -> Mapping[str, int]:
        return {"eos": self.pad_id}

    @cached_property
    def fingerprint(self) -> str:
        pieces = [None if piece is None else piece.hex() for piece in self.token_bytes]
        return hashlib.sha256(json.dumps([self._encoding.name, pieces]).encode()).hexdigest()

    def spellings(self, fragment: bytes) -> Iterator[Sequence[int]]:
        try:
            yield self.encode(fragment.decode())
        except UnicodeDecodeError:
            yield self._encoding._encode_single_piece(fragment)  # the library has no public call for bytes

    def _offsets(self, text: str) -> NoReturn:
        raise DataError(
            "the tokens of a text do not join to the text",
            "tiktoken encodings never change a text, so the rank file lacks some bytes",
            "use the rank file that was published with the encoding",
            code="token-beyond-vocabulary",
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        encode = self._encoding.encode_single_token
        return {string: encode(string) for string in self._encoding.special_tokens_set}


def load_tiktoken(model: str) -> Tokenizer:
    """Load the tokenizer of a rank file, told by its name. Raises UsageError if it cannot be loaded."""
    name = Path(model).name.removesuffix(".tiktoken")
    if name not in ENCODINGS:
        if name == RANKS_FILE:
            why = "Kimi's and Moonlight's ranks need the settings in tokenizer_config.json beside them"
            do = f"name the folder, with --tokenizer-type HuggingFaceTokenizer: {Path(model).parent}"
            raise UsageError(f"{model} is not all of a tokenizer", why, do, code="tokenizer-file-not-valid")
        raise UsageError(
            f"--tokenizer-model {model}: the encoding {name} is not known",
            "a rank file does not say how text is split into words",
            f"give one of the files {', '.join(f'{known}.tiktoken' for known in ENCODINGS)}, under that name",
            code="tokenizer-file-not-valid",
        )
    try:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe
    except ImportError as error:
        what, do = f"--tokenizer-model {model} needs the package tiktoken", "pip install tiktoken"
        raise UsageError(what, str(error), do, code="package-missing") from error
    try:
        ranks = load_tiktoken_bpe(str(model))
    except (OSError, ValueError) as error:
        what = f"--tokenizer-model {model} is not a tiktoken rank file"
        do = "check that the file is complete and not a Git LFS pointer"
        raise UsageError(what, str(error), do, code="tokenizer-file-not-valid") from error
    known = dict(pat_str=ENCODINGS[name].pattern, special_tokens=ENCODINGS[name].special)
    return TiktokenTokenizer(tiktoken.Encoding(name, mergeable_ranks=ranks, **known))
