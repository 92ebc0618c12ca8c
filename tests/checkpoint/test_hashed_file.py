"""Check files that are hashed while they are written: contents, description, and disks that fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import random
import resource
import threading
import time

import pytest
import torch

from mkd.checkpoint.hashed_file import BUFFER_BYTES, HashedFile
from mkd.checkpoint.manifest import FileEntry
from mkd.checkpoint.saving import _causes


def write(path, pieces):
    with HashedFile(path) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
    return file.entry


def entry_of(content):
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


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


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def direct_path(tmp_path):
    """Return a folder whose file system supports O_DIRECT; skip the test without one."""
    try:
        os.close(os.open(tmp_path / "tried", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    return tmp_path


def test_the_bytes_go_past_the_page_cache_where_the_file_system_lets_them(direct_path):
    with HashedFile(direct_path / "file") as file:
        file.write(bytes(BUFFER_BYTES + 5))
    assert file.is_direct


def refuse(descriptor_of):
    """Wrap a function of `os` so that it refuses every direct write (O_DIRECT) with EINVAL."""

    def refusing(function):
        def refused(first, second, *more):
            if descriptor_of(first, second):
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return function(first, second, *more)

        return refused

    return refusing


@pytest.mark.parametrize(
    ("name", "refusing"),
    [
        ("open", refuse(lambda path, flags: flags & os.O_DIRECT)),  # the file system
        ("pwrite", refuse(lambda descriptor, block: is_direct(descriptor))),  # the disk
    ],
)
def test_file_systems_without_o_direct(direct_path, monkeypatch, name, refusing):
    monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    content = random.Random(3).randbytes(2 * BUFFER_BYTES + 5)
    with HashedFile(direct_path / "file") as file:
        file.write(content)
    assert not file.is_direct
    assert (direct_path / "file").read_bytes() == content
    assert file.entry == entry_of(content)


def test_a_slow_disk_that_takes_a_part_at_a_time(tmp_path, monkeypatch):
    def slow(descriptor, block, place, pwrite=os.pwrite):
        time.sleep(0.02)
        return pwrite(descriptor, block[: BUFFER_BYTES // 4 if is_direct(descriptor) else 1_234_567], place)

    monkeypatch.setattr(os, "pwrite", slow)
    content = random.Random(4).randbytes(3 * BUFFER_BYTES + 5)
    assert write(tmp_path / "file", [content]) == entry_of(content)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("answer", [OSError(errno.ENOSPC, "full"), 0], ids=["an error", "nothing written"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_disk_that_fails_under_a_tensor(tmp_path, monkeypatch, answer, failing):
    """If any block fails, the file fails: no later bytes are written; threads and descriptors end."""
    places = []

    def fails(descriptor, block, place, pwrite=os.pwrite):
        places.append(place)
        if place // BUFFER_BYTES == failing:
            if answer == 0:
                return 0
            raise answer
        return pwrite(descriptor, block, place)

    monkeypatch.setattr(os, "pwrite", fails)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises((OSError, RuntimeError)) as raised, HashedFile(tmp_path / "file") as file:
        torch.save(torch.ones(4 * BUFFER_BYTES // 4), file)
    met = {cause.errno for cause in _causes(raised.value) if isinstance(cause, OSError)}
    assert met == {errno.EIO if answer == 0 else errno.ENOSPC}
    assert max(places) // BUFFER_BYTES == failing
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


def test_an_error_that_the_caller_passes_over_ends_the_file_all_the_same(tmp_path, monkeypatch):
    def fails_once(descriptor, block, place, pwrite=os.pwrite):
        if place == 0:
            raise OSError(errno.EIO, "broken")
        return pwrite(descriptor, block, place)

    monkeypatch.setattr(os, "pwrite", fails_once)
    with pytest.raises(OSError, match="broken"), HashedFile(tmp_path / "file") as file:
        for _ in range(4):
            with contextlib.suppress(OSError):
                file.write(bytes(BUFFER_BYTES))


def test_what_the_disk_refuses_is_raised(tmp_path):
    """Reach the limit on the size of files in the second buffer: by a later write, or at the end."""
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
