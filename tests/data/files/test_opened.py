"""Compressed files: the same rows as plain ones, damage found, sizes of their text."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest

from mkd.data.files.opened import READ_BYTES, text_bytes
from mkd.data.records.rows import read_rows
from tests.reported import refused

WORDS = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(8_000)]  # hardly to compress
LINES = [json.dumps({"text": word + " fox" * (i % 20)}).encode() for i, word in enumerate(WORDS)]
TEXT = b"\n".join(LINES) + b"\n"


def compress(content: bytes, end: str) -> bytes:
    if end == ".gz":
        return gzip.compress(content)
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(content)


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_parts_are_read_as_one_text_and_damage_is_an_error(end, tmp_path):
    path = tmp_path / f"a.jsonl{end}"
    half = len(TEXT) // 2  # in the middle of a line
    parts = compress(TEXT[:half], end) + compress(b"", end) + compress(TEXT[half:], end)
    assert len(parts) > 2 * READ_BYTES
    path.write_bytes(parts)
    assert [row for _, row in read_rows(path)] == LINES
    assert text_bytes([path]) == pytest.approx(len(TEXT), rel=0.1)  # zstd holds text back
    for damaged in (parts[:-3], parts[: len(parts) // 4], parts[:1000] + b"\x07" * 9 + parts[1009:], b"{}"):
        path.write_bytes(damaged)
        with refused(f"data-file-unreadable: a.jsonl{end} is no intact {end} file"):
            list(read_rows(path))


def test_padding_and_an_empty_file(tmp_path):
    padded, empty = tmp_path / "a.txt.gz", tmp_path / "b.txt.gz"
    padded.write_bytes(gzip.compress(b"one\n\ntwo") + b"\0" * 512)
    assert list(read_rows(padded)) == [(1, {"text": b"one"}), (3, {"text": b"two"})]
    long = gzip.compress(b"one\n") + b"\0" * (3 * READ_BYTES) + gzip.compress(b"two")
    padded.write_bytes(long)  # the text does not end where the zeros fill a block
    assert list(read_rows(padded)) == [(1, {"text": b"one"}), (2, {"text": b"two"})]
    empty.write_bytes(gzip.compress(b""))
    assert list(read_rows(empty)) == []
    empty.write_bytes(b"")  # a download that was cut to nothing
    with refused("data-file-unreadable: b.txt.gz is no intact .gz file") as caught:
        list(read_rows(empty))
    assert caught.value.why == "it is empty"


def test_sizes_of_many_files_follow_from_the_first(tmp_path):
    paths = [tmp_path / f"{i}.jsonl.gz" for i in range(40)]
    for path in paths:
        path.write_bytes(gzip.compress(TEXT[:100_000]))
    (tmp_path / "plain.jsonl").write_bytes(TEXT)
    total = text_bytes([*paths, tmp_path / "plain.jsonl", tmp_path / "missing.jsonl"])
    assert total == pytest.approx(len(TEXT) + 40 * 100_000, rel=1e-6)


def test_zst_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    if sys.version_info >= (3, 14):
        pytest.skip("Python reads it")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = Path(tmp_path / "a.jsonl.zst")
    path.write_bytes(b"x")
    with refused("data-package-missing: needs the package zstandard") as caught:
        list(read_rows(path))
    assert "megatron-kd[data]" in caught.value.do


def test_tables_are_not_compressed_again(tmp_path):
    with refused("data-file-kind-unknown: .gz is not a known kind of file"):
        list(read_rows(tmp_path / "a.parquet.gz"))
