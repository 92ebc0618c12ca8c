"""A new file that is hashed while the disk takes it, past the page cache.

Written the usual way, bytes are first copied to the page cache, and that takes a processor as long as hashing them does.
With O_DIRECT the disk fetches them from this process, and the processor is free to hash the next ones meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

from mkd.checkpoint.manifest import FileEntry

BUFFER_BYTES = 1 << 22
ALIGNMENT = 1 << 12  # of places, lengths and memory, in bytes: what disks ask for
DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # the answers of a file system in memory, of a disk of larger blocks


class HashedFile:
    """Write only. After a `with` block that raised nothing the bytes are on the disk, and `entry` describes them."""

    def __init__(self, path: Path):
        self.size, self.digest = 0, hashlib.sha256()
        self.descriptor = _open(path)
        self.filling, self.leaving = mmap(-1, BUFFER_BYTES), mmap(-1, BUFFER_BYTES)  # aligned, as it is whole pages
        self.disk = ThreadPoolExecutor(1)
        self.left: Future | None = None  # done when `leaving` is free again

    def write(self, data: bytes | memoryview) -> int:
        """Returns the bytes taken, which are all; `data` may change afterwards. Raises OSError for these or earlier bytes."""
        data = memoryview(data).cast("B")
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
        before, self.left = self.left, self.disk.submit(self._to_disk, self.filling, length, self.size - length)
        with memoryview(self.filling) as bytes_left:
            self.digest.update(bytes_left[:length])
        if before is not None:
            before.result()
        self.filling, self.leaving = self.leaving, self.filling

    def _to_disk(self, buffer: mmap, length: int, place: int) -> None:
        end = -(-length // ALIGNMENT) * ALIGNMENT  # more than the file has, where it ends: cut off by _finish
        done = 0
        with memoryview(buffer) as view:
            while done < end:
                try:
                    done += os.pwrite(self.descriptor, view[done:end], place + done)
                except OSError as error:
                    if error.errno not in NOT_DIRECT or not _is_direct(self.descriptor):
                        raise
                    _through_page_cache(self.descriptor)

    def _finish(self) -> None:
        rest = self.size % BUFFER_BYTES
        if rest:
            self._hand_over(rest)
        if self.left is not None:
            self.left.result()
        os.ftruncate(self.descriptor, self.size)
        os.fsync(self.descriptor)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
    return os.open(path, flags, 0o666)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)


def _through_page_cache(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT)
