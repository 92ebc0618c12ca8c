"""Hugging Face fast tokenizers (`tokenizer.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mkd.errors import UsageError
from mkd.file_start import content_of_file
from mkd.tokenizers.chat import ChatEncoder, EncodedChat, mask_of_spans
from mkd.tokenizers.chat_input import ChatSettings, Conversation
from mkd.tokenizers.chat_template import ChatTemplate
from mkd.tokenizers.pieces import (
    BYTE_TOKEN,
    METASPACE,
    byte_level_bytes,
    characters_of_bytes,
    metaspace_bytes,
    spell_runs,
    split_valid,
)
from mkd.tokenizers.spans import EncodedText, byte_offsets, locate, utf8
from mkd.tokenizers.tokenizer import Tokenizer, no_chat_template, sha256_of
from mkd.tokenizers.tokenizer_files import (
    MODEL_CONFIG,
    TOKENIZER_FILES,
    WRITE_JSON,
    config_refusal,
    has_tokenizer,
    in_one_line,
    no_tokenizer,
    open_hf,
    own_code,
)


@dataclass(frozen=True)
class _Style:
    """Form of bytes in the vocabulary: GPT-2's characters for bytes, or SentencePiece's metaspace."""

    byte_level: bool
    byte_tokens: bool  # <0xNN> is a byte

    @classmethod
    def from_parsed(cls, tokenizer: Mapping[str, Any]) -> _Style:
        """Return the style that the decoder of a tokenizer.json shows. Raises UsageError for another."""
        decoder = tokenizer["decoder"] or {"type": "none"}
        steps = decoder.get("decoders", [decoder])
        types = [step["type"] for step in steps]
        metaspace = "Metaspace" in types or any(
            step["type"] == "Replace" and step["pattern"] == {"String": METASPACE} for step in steps
        )
        if "ByteLevel" not in types and not metaspace:
            raise UsageError(
                f"the bytes of the tokenizer's tokens are not known: its decoder is {' + '.join(types)}",
                "texts are aligned by bytes, which byte-level BPE and SentencePiece vocabularies give",
                "use models with such a tokenizer",
                code="tokenizer-missing",
            )
        return cls("ByteLevel" in types, "ByteFallback" in types)

    def is_byte(self, string: str) -> bool:
        return self.byte_tokens and BYTE_TOKEN.fullmatch(string) is not None

    def bytes_of(self, string: str) -> bytes:
        return byte_level_bytes(string) if self.byte_level else metaspace_bytes(string, self.is_byte(string))


class HuggingFaceTokenizer(Tokenizer):
    """A fast transformers tokenizer.

    It is called through its Rust backend: one text then starts no thread pool, about which each fork of a
    worker would warn.
    """

    def __init__(self, hf: Any, chat: ChatSettings | None = None) -> None:
        self._hf = hf
        self._chat = chat or ChatSettings()
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_id = hf.eos_token_id
        self.pad_id = next((i for i in (hf.pad_token_id, hf.eos_token_id) if i is not None), 0)
        self.has_chat_template = hf.chat_template is not None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True).ids

    def encode_continuation(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False).ids

    def encode_spans(self, text: str, *, continuation: bool = False) -> EncodedText:
        data = utf8(text)
        encoding = self._encode(text, add_special_tokens=not continuation)
        in_text = np.array(encoding.special_tokens_mask, dtype=bool) == 0
        return locate(encoding.ids, in_text, self._pieces, data, lambda: byte_offsets(text, encoding.offsets))

    def encode_with_control_tokens(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = False
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        self._backend.encode_special_tokens = False
        encoding = self._backend.encode("".join(text for text, _ in segments), add_special_tokens=False)
        ends = list(accumulate(len(text) for text, _ in segments))
        places = zip([0, *ends], ends, segments, strict=False)
        spans = [(start, end) for start, end, (_, loss) in places if loss and start < end]
        return encoding.ids, mask_of_spans(encoding.offsets, spans)

    def apply_chat_template(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        return self._chats.encode(conversation)

    def render(self, conversation: Conversation) -> str:
        return self._template.render(conversation)

    def generation_prompt(self, conversation: Conversation) -> list[int]:
        return self._chats.generation_prompt(conversation)

    def encode_turns(self, conversation: Conversation) -> EncodedChat:
        return self._chats.encode_turns(conversation, self._pieces)

    def describe_chat(self) -> list[str]:
        return [self._template.describe(), *self.describe_date()] if self.has_chat_template else []

    def describe_date(self) -> list[str]:
        return self._template.describe_date() if self.has_chat_template else []

    @property
    def chat_date(self) -> str | None:
        return self._chat.date if self.has_chat_template and self._template.writes_date else None

    @property
    def chat_variables(self) -> frozenset[str]:
        return self._template.variables if self.has_chat_template else frozenset()

    @property
    def has_chat_marks(self) -> bool:
        both = (Conversation((), tools) for tools in (None, ()))
        return self.has_chat_template and any(map(self._template.has_marks, both))

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        added = self._backend.get_added_tokens_decoder()
        silent = {i for i, token in added.items() if token.special}
        silent |= {*self._hf.all_special_ids, self.roles.get("unk")}
        return tuple(None if i in silent else piece for i, piece in enumerate(self._pieces))

    @cached_property
    def roles(self) -> Mapping[str, int]:
        hf = self._hf
        ids = {"bos": hf.bos_token_id, "eos": hf.eos_token_id, "pad": hf.pad_token_id}
        unknown_token = getattr(self._backend.model, "unk_token", None)
        unknown = None if unknown_token is None else self.vocabulary.get(unknown_token)
        closing = self._chats.closing if self.has_chat_template else None
        ids |= {
            # byte-level BPE never emits UNK, and may name any other token for it
            "unk": None if unknown in ids.values() else unknown,
            "end_of_turn": None if closing is None else self.vocabulary.get(closing),
        }
        return {role: i for role, i in ids.items() if i is not None}

    def spellings(self, fragment: bytes) -> Iterator[Sequence[int]]:
        runs = split_valid(fragment)
        if len(runs) == 1 and isinstance(runs[0], str):
            yield self.encode_continuation(runs[0])
        if self._style.byte_level:
            table = characters_of_bytes()
            yield self._model_ids("".join(table[byte] for byte in fragment))
        elif (spelled := spell_runs(runs, self._spell_run, self._byte_ids)) is not None:
            yield spelled

    @cached_property
    def fingerprint(self) -> str:
        return sha256_of([self._backend.to_str(), self.eos_id, self._hf.chat_template])

    @cached_property
    def chat_fingerprint(self) -> str:
        settings = self._template.fingerprint if self.has_chat_template else []
        return sha256_of([self.fingerprint, *settings]) if settings else self.fingerprint

    @cached_property
    def _chats(self) -> ChatEncoder:
        """The encoder of conversations. Raises DataError if the tokenizer has no chat template."""
        if not self.has_chat_template:
            raise no_chat_template()
        return ChatEncoder(self._hf, ChatTemplate(self._hf, self._chat))

    @property
    def _template(self) -> ChatTemplate:
        return self._chats.template

    @cached_property
    def _style(self) -> _Style:
        return _Style.from_parsed(json.loads(self._backend.to_str()))

    @cached_property
    def _pieces(self) -> tuple[bytes | None, ...]:
        """Bytes that each id spells, [vocab_size], control tokens included; None for unused ids."""
        pieces: list[bytes | None] = [None] * self.vocab_size
        for string, i in self.vocabulary.items():
            pieces[i] = string.encode() if string in self.special_tokens else self._style.bytes_of(string)
        if self.roles.get("unk") is not None:
            pieces[self.roles["unk"]] = None  # it replaces different bytes every time
        return tuple(pieces)

    @cached_property
    def _byte_ids(self) -> Mapping[bytes, int]:
        named = ((self._pieces[i], i) for string, i in self.vocabulary.items() if self._style.is_byte(string))
        return {piece: i for piece, i in named if piece is not None}

    def _spell_run(self, text: str) -> list[int]:
        return self._model_ids(text.replace(" ", METASPACE))

    def _model_ids(self, text: str) -> list[int]:
        return [token.id for token in self._backend.model.tokenize(text)]

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        self._backend.encode_special_tokens = True  # control tokens in the text are plain text
        return self._backend.encode(text, add_special_tokens=add_special_tokens)


def load_hugging_face(model: str, chat: ChatSettings | None = None) -> Tokenizer:
    """Load a tokenizer from a folder or a hub id. Raises UsageError if it cannot be loaded."""
    if Path(model).is_dir() and not has_tokenizer(model):
        raise no_tokenizer(model)
    try:
        hf, is_rebuilt = open_hf(model)
    except UsageError:  # of Kimi's files
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise not_loadable(model, error) from error
    tokenizer = HuggingFaceTokenizer(require_fast(hf, model), chat)
    tokenizer.is_rebuilt = is_rebuilt
    return tokenizer


def not_loadable(model: str, error: Exception) -> UsageError:
    """Return the error for a tokenizer that raised `error`: transformers reads its config.json first."""
    refusal = config_refusal(model)
    if refusal is not None:
        return UsageError(
            f"transformers refuses {Path(model) / MODEL_CONFIG}",
            f"{in_one_line(refusal)}; it reads the file with the tokenizer, and with every export",
            "correct the file, or download it again",
            code="tokenizer-file-not-valid",
        )
    for name in (*TOKENIZER_FILES, "tokenizer_config.json"):
        if content := content_of_file(Path(model) / name):
            what, do = f"{Path(model) / name} is {content.what}", content.do
            return UsageError(what, "no tokenizer can be read", do, code="tokenizer-file-not-valid")
    return UsageError(
        f"{model}: no Hugging Face tokenizer could be loaded",
        own_code(error) or in_one_line(error),
        WRITE_JSON
        if own_code(error)
        else "give a folder with tokenizer.json and tokenizer_config.json, or the id of a model on the Hub",
        code="tokenizer-missing",
    )


def require_fast(hf: Any, name: str) -> Any:
    """Return `hf`. Raises UsageError, which calls it `name`, if it is not a fast tokenizer."""
    if not hf.is_fast:
        raise UsageError(
            f"{name}: {type(hf).__name__} is not a fast tokenizer",
            "loss masks of conversations need the character offsets that only tokenizer.json gives",
            "convert it to tokenizer.json with transformers, or use --tokenizer-type SentencePieceTokenizer",
            code="tokenizer-missing",
        )
    return hf
