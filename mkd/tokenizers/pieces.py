"""Bytes of tokens, as tokenizers write them in the strings of their vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

METASPACE = "\u2581"  # SentencePiece's character for a blank
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
VALID_OR_ONE_BYTE = re.compile("[^\udc80-\udcff]+|[\udc80-\udcff]")


@cache
def byte_characters() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2's table).

    Printable Latin-1 characters represent their own bytes; U+0100 and later represent the other bytes.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@cache
def characters_of_bytes() -> dict[int, str]:
    """Return byte -> character of byte-level BPE."""
    return {byte: character for character, byte in byte_characters().items()}


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a token of byte-level BPE; of a string with other characters, its UTF-8 bytes."""
    table = byte_characters()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


def metaspace_bytes(piece: str, is_byte: bool) -> bytes:
    """Return the bytes of a SentencePiece token; with `is_byte` it is one byte, written <0xNN>."""
    return bytes.fromhex(piece[3:5]) if is_byte else piece.replace(METASPACE, " ").encode()


def spell_runs(
    runs: list[str | bytes], encode: Callable[[str], list[int]], byte_ids: Mapping[bytes, int]
) -> list[int] | None:
    """Return the ids of `split_valid` runs: texts encoded, bytes by their own ids; None if one has no id."""
    if not all(isinstance(run, str) or run in byte_ids for run in runs):
        return None
    return [i for run in runs for i in (encode(run) if isinstance(run, str) else [byte_ids[run]])]


def split_valid(fragment: bytes) -> list[str | bytes]:
    """Split `fragment` into runs of UTF-8 text (str) and single other bytes (bytes)."""
    runs = VALID_OR_ONE_BYTE.findall(fragment.decode("utf-8", "surrogateescape"))
    return [run.encode("utf-8", "surrogateescape") if "\udc80" <= run[0] <= "\udcff" else run for run in runs]
