"""The bytes of files that may be compressed. Nothing is unpacked on the disk."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mkd.config.data_files import COMPRESSED
from mkd.errors import DataError, MkdError

READ_BYTES = 1 << 16  # of compressed bytes at a time
BUFFER_BYTES = 1 << 20
SAMPLED = 16  # compressed files whose beginning is read to estimate the size of all
SAMPLE_BYTES = 1 << 18  # of a compressed file, from which its size is estimated
GZIP_WINDOW = 31  # zlib's number for a gzip header and a CRC
LARGEST_WINDOW = 31  # zstd --long=31, in bits


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading; one that ends in .gz or .zst gives its text.

    Raises OSError, and DataError for a damaged file while it is read.
    """
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    return io.BufferedReader(_Decompressed(path), BUFFER_BYTES)


def text_bytes(paths: Iterable[str | Path]) -> int:
    """Return the size of the text of files that exist; of compressed ones, an estimate.

    Only the first of them are read, to learn by how much they shrank.
    """
    compressed, total = list[Path](), 0
    for path in map(Path, paths):
        if path.suffix in COMPRESSED:
            compressed.append(path)
        else:
            total += path.stat().st_size if path.is_file() else 0
    sizes = [path.stat().st_size if path.is_file() else 0 for path in compressed]
    known = [_text_bytes(path) for path, size in zip(compressed[:SAMPLED], sizes, strict=False) if size]
    growth = sum(known) / max(1, sum(sizes[:SAMPLED]))
    return total + round(growth * sum(sizes))


def _text_bytes(path: Path) -> int:
    """Return the size of one file's text, if it is compressed estimated from its beginning."""
    size = path.stat().st_size
    if path.suffix not in COMPRESSED:
        return size
    with suppress(MkdError, OSError), _Decompressed(path) as file:  # the run says what is wrong with it
        num_bytes = file.text_bytes(SAMPLE_BYTES)
        return round(num_bytes * size / max(1, file.bytes_read))
    return size


class _Decompressed(io.RawIOBase):
    """The text of a compressed file, which may have several parts (members of gzip, frames of zstd)."""

    def __init__(self, path: Path):
        """Open `path`. Raises OSError, and DataError without the package that reads it."""
        # A decoder has `decompress`, `eof` and `unused_data`, as those of zlib have.
        self._new_decoder = _gzip if path.suffix == ".gz" else _zstd(path)
        self._decoder = self._new_decoder()
        self._path, self._file = path, path.open("rb")
        self._ready, self._is_inside = b"", False
        self.bytes_read = 0  # compressed ones

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (block := self._next_block()):
            self._ready = self._decoded(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def text_bytes(self, limit: int) -> int:
        """Read about `limit` compressed bytes from here on, and return the size of their text."""
        found = 0
        while self.bytes_read < limit and (block := self._next_block()):
            found += len(self._decoded(block))
        return found

    def _decoded(self, block: bytes) -> bytes:
        try:
            text = self._decoder.decompress(block)
        except Exception as error:  # of zlib, or of the library that reads zstd
            raise self._damaged(str(error)) from error
        self._is_inside = not self._decoder.eof
        return text

    def _next_block(self) -> bytes:
        """Return compressed bytes of the present part, or of the next one; b"" at the end of the file."""
        if not self._decoder.eof:
            block = self._read()
            if not block and (self._is_inside or self.bytes_read == 0):
                is_empty = self.bytes_read == 0
                raise self._damaged(
                    "it is empty" if is_empty else "it ends in the middle of its compressed data"
                )
            return block
        rest = self._decoder.unused_data.lstrip(b"\0")  # tapes pad with zeros
        while not rest and (block := self._read()):
            rest = block.lstrip(b"\0")
        if rest:
            self._decoder = self._new_decoder()
        return rest

    def _read(self) -> bytes:
        block = self._file.read(READ_BYTES)
        self.bytes_read += len(block)
        return block

    def _damaged(self, why: str) -> DataError:
        return DataError(
            f"{self._path} is no intact {self._path.suffix} file",
            why,
            "copy or compress it again, and check it: "
            + ("gzip -t FILE" if self._path.suffix == ".gz" else "zstd -t FILE"),
            code="data-file-unreadable",
        )


def _gzip() -> Any:
    return zlib.decompressobj(GZIP_WINDOW)


def _zstd(path: Path) -> Callable[[], Any]:
    """Return what makes decoders of zstd. Raises DataError if no library has them."""
    try:
        from compression import zstd  # of Python 3.14
    except ImportError:
        pass
    else:
        window = {zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW}
        return lambda: zstd.ZstdDecompressor(options=window)
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path} needs the package zstandard, which is not installed",
            "it is compressed with zstd",
            "pip install 'megatron-kd[data]', or compress it with gzip",
            code="data-package-missing",
        ) from error
    return zstandard.ZstdDecompressor(max_window_size=1 << LARGEST_WINDOW).decompressobj
