"""A new file that is hashed while the disk takes it, past the page cache.

Written the usual way, bytes are copied to the page cache and from there to the disk, and the kernel's copy takes a
processor nearly as long as hashing. With O_DIRECT the disk fetches them from a buffer of this process, and the processor
is free to hash meanwhile.
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
ALIGNMENT = 1 << 12  # of places, lengths and memory, in bytes: what disks ask for
DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
NOT_DIRECT = (
    errno.EINVAL,
    errno.EOPNOTSUPP,
)  # the answers of a file system in memory, of a disk of larger blocks


class HashedFile:
    """Write only. After a `with` block that raised nothing the bytes are on the disk, and `entry` describes them."""

    def __init__(self, path: Path):
        self.size, self.digest = 0, hashlib.sha256()
        self.filling, self.leaving = (
            np.frombuffer(mmap(-1, BUFFER_BYTES), np.uint8) for _ in range(2)
        )  # whole pages: aligned
        self.descriptor, self.is_direct = _open(path)
        self.disk = ThreadPoolExecutor(1)
        self.left: Future | None = None  # done when `leaving` is free again, and all before it is written

    def write(self, data: bytes | memoryview) -> int:
        """Returns the bytes taken, which are all; `data` may change afterwards. Raises OSError for these or earlier bytes."""
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
        """Part of what torch.save expects of a file; bytes leave when a buffer is full, and in the end."""

    @property
    def entry(self) -> FileEntry:
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
        """Hash the `length` bytes that have been filled in while the disk takes them; go on in the other buffer."""
        before = self.left
        self.left = self.disk.submit(self._to_disk, before, self.filling, length, self.size - length)
        self.digest.update(self.filling[:length])
        if before is not None:
            before.result()
        self.filling, self.leaving = self.leaving, self.filling

    def _to_disk(self, before: Future | None, buffer: np.ndarray, length: int, place: int) -> None:
        """Write the beginning of a buffer. Once something has failed nothing more is written, and its error is raised again."""
        if before is not None:
            before.result()
        done = 0
        while done < length:
            end = (
                -(-length // ALIGNMENT) * ALIGNMENT if self.is_direct else length
            )  # _finish cuts off what is too much
            try:
                written = os.pwrite(self.descriptor, buffer[done:end], place + done)
            except OSError as error:
                if error.errno not in NOT_DIRECT or not self.is_direct:
                    raise
                self._go_through_page_cache()
                continue
            if written == 0:
                raise OSError(errno.EIO, "the file system takes no more bytes, and does not say why")
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
    """A descriptor, and whether it goes past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666), bool(DIRECT)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
    return os.open(path, flags, 0o666), False
