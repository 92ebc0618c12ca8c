"""Facts about files: kept while a file stays the same, found again when it changes."""

from __future__ import annotations

import os
import time

import pytest

from mkd.data.corpus.known_files import FOLDER, SETTLED_S, KnownFiles


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """Yield files that were written some seconds ago, more than there are tests."""
    paths = [tmp_path_factory.mktemp("settled") / "a" for _ in range(10)]
    for path in paths:
        path.write_bytes(b"one")
    time.sleep(SETTLED_S + 0.1)
    return iter(paths)


@pytest.fixture
def file(settled):
    """Return a file of this test alone that was written some seconds ago."""
    return next(settled)


def find(known, path, name="content"):
    """Return the fact, and whether the file was read for it."""
    reads = []
    return known.fact(path, name, lambda: reads.append(1) or path.read_text()), bool(reads)


def test_a_fact_is_found_once_and_again_after_any_change(file, tmp_path):
    assert find(KnownFiles(tmp_path), file) == ("one", True)
    assert find(KnownFiles(tmp_path), file) == ("one", False)
    assert find(KnownFiles(tmp_path), file, "another") == ("one", True)
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert find(KnownFiles(tmp_path), file) == ("two", True)


def test_nothing_is_kept_of_a_file_that_may_still_change(tmp_path):
    """A change within the resolution of the times would go unnoticed."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    assert find(KnownFiles(tmp_path), path) == find(KnownFiles(tmp_path), path) == ("one", True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 1}', '{"facts": {}}'])
def test_a_damaged_note_counts_as_none(file, tmp_path, content):
    find(KnownFiles(tmp_path), file)
    (note,) = (tmp_path / FOLDER).iterdir()
    note.write_text(content)
    assert find(KnownFiles(tmp_path), file) == ("one", True)
    assert find(KnownFiles(tmp_path), file) == ("one", False)


def test_without_a_folder_every_fact_is_found_anew(file, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for known in (KnownFiles(None), KnownFiles(blocked)):
        assert find(known, file) == find(known, file) == ("one", True)
