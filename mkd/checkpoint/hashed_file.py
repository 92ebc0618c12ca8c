"""A new file that is hashed while it is written to the disk, past the page cache.

An ordinary write copies bytes to the page cache and from there to the disk. The kernel's copy takes a
processor nearly as long as hashing. With O_DIRECT the disk fetches the bytes from a buffer of this process,
and the processor hashes meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import numpy as np

from mkd.checkpoint.manifest import FileEntry

BUFFER_BYTES = 1 << 22
ALIGNMENT = 1 << 12  # bytes; disks require it for offsets, lengths and memory
DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # file systems in memory, disks with larger blocks


class HashedFile:
    """A write-only file. After a `with` block without an error, the disk has the bytes of `entry`."""

    def __init__(self, path: Path):
        self.size, self.digest = 0, hashlib.sha256()
        # mmap returns whole pages, which are aligned.
        self.filling, self.leaving = (np.frombuffer(mmap(-1, BUFFER_BYTES), np.uint8) for _ in range(2))
        self.descriptor, self.is_direct = _open(path)
        self.disk = ThreadPoolExecutor(1)
        self.left: Future | None = None  # done when `leaving` is free and everything before it is written

    def write(self, data: bytes | memoryview) -> int:
        """Take all of `data`, which may change afterwards. Raises OSError if these or earlier bytes fail."""
        data = np.frombuffer(data, np.uint8)
        taken = 0
        while taken < len(data):
            used = self.size % BUFFER_BYTES
            piece = data[taken : taken + BUFFER_BYTES - used]
            self.filling[used : used + len(piece)] = piece
            self.size += len(piece)
            taken += len(piece)
            if self.size % BUFFER_BYTES == 0:
                self._hand_over(BUFFER_BYTES)
        return taken

    def flush(self) -> None:
        """Do nothing; torch.save calls it. Bytes are written when a buffer is full, and at the end."""

    @property
    def entry(self) -> FileEntry:
        """Size and SHA-256 of the bytes taken."""
        return FileEntry(self.size, self.digest.hexdigest())

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            with self.disk:
                if kind is None:
                    self._finish()
        finally:
            os.close(self.descriptor)

    def _hand_over(self, length: int) -> None:
        """Hash `length` bytes of the full buffer while the disk takes them; continue in the other."""
        before = self.left
        self.left = self.disk.submit(self._to_disk, before, self.filling, length, self.size - length)
        self.digest.update(self.filling[:length])
        if before is not None:
            before.result()
        self.filling, self.leaving = self.leaving, self.filling

    def _to_disk(self, before: Future | None, buffer: np.ndarray, length: int, place: int) -> None:
        """Write the first `length` bytes of `buffer`. After an error, write no more and raise it again."""
        if before is not None:
            before.result()
        done = 0
        while done < length:
            # _finish cuts off the bytes beyond `length`.
            end = -(-length // ALIGNMENT) * ALIGNMENT if self.is_direct else length
            try:
                written = os.pwrite(self.descriptor, buffer[done:end], place + done)
            except OSError as error:
                if error.errno not in NOT_DIRECT or not self.is_direct:
                    raise
                self._go_through_page_cache()
                continue
            if written == 0:
                raise OSError(errno.EIO, "the file system takes no more bytes and gives no reason")
            done += written

    def _go_through_page_cache(self) -> None:
        self.is_direct = False
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~DIRECT)

    def _finish(self) -> None:
        rest = self.size % BUFFER_BYTES
        if rest:
            self._hand_over(rest)
        if self.left is not None:
            self.left.result()
        if os.fstat(self.descriptor).st_size != self.size:
            os.ftruncate(self.descriptor, self.size)
        os.fsync(self.descriptor)


def _open(path: Path) -> tuple[int, bool]:
    """Return (descriptor, whether writes bypass the page cache)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666), bool(DIRECT)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
    return os.open(path, flags, 0o666), False
