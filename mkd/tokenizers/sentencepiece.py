"""SentencePiece `.model` files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from mkd.errors import UsageError
from mkd.tokenizers.pieces import metaspace_bytes, spell_runs, split_valid
from mkd.tokenizers.tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file. Its configuration has no BOS, so none is added."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor):
        self._processor = processor
        self.eos_id = processor.eos_id() if processor.eos_id() >= 0 else None
        self.pad_id = next((i for i in (processor.pad_id(), processor.eos_id()) if i >= 0), 0)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

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
    def token_bytes(self) -> tuple[bytes | None, ...]:
        return tuple(self._piece_bytes(i) for i in range(self._processor.get_piece_size()))

    @cached_property
    def roles(self) -> Mapping[str, int]:
        ids = {role: getattr(self._processor, f"{role}_id")() for role in ("bos", "eos", "pad", "unk")}
        return {role: i for role, i in ids.items() if i >= 0}

    def spellings(self, fragment: bytes) -> Iterator[Sequence[int]]:
        spelled = spell_runs(split_valid(fragment), self._inner.encode, self._byte_ids)
        if spelled is not None:
            yield spelled

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._processor.serialized_model_proto()).hexdigest()

    @cached_property
    def _inner(self) -> sentencepiece.SentencePieceProcessor:
        """The same model for the middle of a text: it adds no blank before the text and removes none."""
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(self._processor.serialized_model_proto())
        model.normalizer_spec.add_dummy_prefix = False
        model.normalizer_spec.remove_extra_whitespaces = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    @cached_property
    def _byte_ids(self) -> Mapping[bytes, int]:
        pieces = enumerate(self.token_bytes)
        return {piece: i for i, piece in pieces if piece is not None and self._processor.is_byte(i)}

    def _piece_bytes(self, token: int) -> bytes | None:
        piece = self._processor.id_to_piece(token)
        if piece in self.special_tokens:
            return None
        return metaspace_bytes(piece, self._processor.is_byte(token))

    def _offsets(self, text: str) -> np.ndarray:
        pieces = self._processor.encode(text, return_type="proto").pieces
        return np.array([(piece.begin, piece.end) for piece in pieces], dtype=np.int64).reshape(-1, 2)


def load_sentencepiece(model: str) -> Tokenizer:
    """Load a `.model` file. Raises UsageError if it cannot be loaded."""
    if not Path(model).is_file():
        raise UsageError(
            f"--tokenizer-model {model} is not a file",
            "--tokenizer-type SentencePieceTokenizer reads one SentencePiece .model file",
            "give the path of the .model file, or use --tokenizer-type HuggingFaceTokenizer for a folder",
            code="path-not-found",
        )
    try:
        return SentencePieceTokenizer(sentencepiece.SentencePieceProcessor(model_file=model))
    except (RuntimeError, OSError) as error:
        what = f"--tokenizer-model {model} is not a SentencePiece model"
        do = "check that the file is complete and not a Git LFS pointer"
        raise UsageError(what, str(error), do, code="tokenizer-file-not-valid") from error
