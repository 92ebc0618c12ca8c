"""Recognise a file by its first bytes: a pointer of Git LFS, a page of HTML, or a format of another name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LENGTH = 512  # bytes that are looked at


class Content(NamedTuple):
    """A kind of content that people meet in the place of the file that they want."""

    kind: str
    what: str  # the words behind "FILE is"
    do: str


_AGAIN = "download the file itself again"
_POINTER = Content("pointer", "a pointer of Git LFS, not the file itself", "git lfs pull, or hf download")
_PAGE = Content("page", "a page of HTML, as a download without a login leaves it", _AGAIN)
_UTF16 = Content("utf-16", "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW")
_STARTS = {
    b"version https://git-lfs": _POINTER,
    b"\x1f\x8b": Content("gzip", "compressed with gzip", "unpack it with gunzip, or let its name end in .gz"),
    b"\x28\xb5\x2f\xfd": Content("zstd", "compressed with zstd", "unpack it, or let its name end in .zst"),
    b"PK\x03\x04": Content("zip", "a ZIP archive, which torch.save writes too", "unpack or convert it"),
    b"PAR1": Content("parquet", "a Parquet file", "let its name end in .parquet"),
    b"ARROW1": Content("arrow", "an Arrow file", "let its name end in .arrow"),
    b"GGUF": Content("gguf", "a GGUF file of llama.cpp", "use the original files of the model"),
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_PAGE_STARTS = (b"<!doctype html", b"<html")


def content_of(start: bytes) -> Content | None:
    """Return what a file with these first bytes is, None if they tell nothing."""
    found = next((content for begin, content in _STARTS.items() if start.startswith(begin)), None)
    return found or (_PAGE if start.lstrip().lower().startswith(_PAGE_STARTS) else None)


def content_of_file(path: str | Path) -> Content | None:
    """Return what the file is, None if its first bytes tell nothing or cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return content_of(file.read(LENGTH))
    return None
