"""Files that are hashed while the disk takes them: the bytes, what describes them, and disks that do not play along."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
from pathlib import Path

import pytest
import torch

from mkd.checkpoint import hashed_file
from mkd.checkpoint.hashed_file import BUFFER_BYTES, HashedFile
from mkd.checkpoint.manifest import FileEntry

IN_MEMORY = Path("/dev/shm")  # a file system that may refuse O_DIRECT


def write(path, pieces):
    with HashedFile(path) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
    return file.entry


def entry_of(content):
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def memory_folder(tmp_path):
    if not IN_MEMORY.is_dir():
        pytest.skip("no file system in memory")
    folder = IN_MEMORY / f"mkd-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


SIZES = (0, 1, 4095, 4096, 4097, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 5 * BUFFER_BYTES + 777)


@pytest.mark.parametrize("size", SIZES)
def test_the_file_has_the_bytes_and_the_entry_describes_them(tmp_path, size):
    content = random.Random(size).randbytes(size)
    assert write(tmp_path / "one", [content]) == entry_of(content)
    assert (tmp_path / "one").read_bytes() == content


def test_pieces_of_any_size_that_change_after_they_were_written(tmp_path):
    generator = random.Random(1)
    content, memory = bytearray(), bytearray(3 * BUFFER_BYTES)
    with HashedFile(tmp_path / "pieces") as file:
        for size in (1, 7, BUFFER_BYTES - 8, 2 * BUFFER_BYTES + 3, 100, BUFFER_BYTES, 5):
            memory[:size] = generator.randbytes(size)
            content += memory[:size]
            file.write(memoryview(memory)[:size])
            memory[:size] = bytes(size)
    assert (tmp_path / "pieces").read_bytes() == content
    assert file.entry == entry_of(bytes(content))


def test_a_file_that_was_there_is_replaced(tmp_path):
    (tmp_path / "old").write_bytes(bytes(10_000))
    assert write(tmp_path / "old", [b"new"]) == entry_of(b"new")
    assert (tmp_path / "old").read_bytes() == b"new"


def test_tensors_as_torch_saves_them(tmp_path):
    tensor = torch.randn(300_000)
    with HashedFile(tmp_path / "tensor.pt") as file:
        torch.save(tensor, file)
    assert torch.equal(torch.load(tmp_path / "tensor.pt", weights_only=True), tensor)
    assert file.entry == entry_of((tmp_path / "tensor.pt").read_bytes())


def test_a_file_system_in_memory(memory_folder):
    content = random.Random(2).randbytes(BUFFER_BYTES + 5)
    assert write(memory_folder / "file", [content]) == entry_of(content)
    assert (memory_folder / "file").read_bytes() == content


def test_a_disk_of_larger_blocks_than_expected(tmp_path, monkeypatch):
    monkeypatch.setattr(hashed_file, "ALIGNMENT", 1)  # lengths that a real disk refuses
    content = random.Random(3).randbytes(BUFFER_BYTES + 5)
    assert write(tmp_path / "file", [content]) == entry_of(content)
    assert (tmp_path / "file").read_bytes() == content


def test_what_the_disk_refuses_is_raised(tmp_path):
    """A limit on the size of files, met in the second buffer: by a later write, or in the end."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_BYTES, limits[1]))
    try:
        for pieces in ([bytes(BUFFER_BYTES)] * 4, [bytes(BUFFER_BYTES), b"more"]):
            with pytest.raises(OSError) as raised:
                write(tmp_path / "file", pieces)
            assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_exception_of_the_caller_comes_through(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="mine"), HashedFile(tmp_path / "file") as file:
        file.write(bytes(BUFFER_BYTES + 1))
        raise ValueError("mine")
    assert len(os.listdir("/proc/self/fd")) == descriptors
