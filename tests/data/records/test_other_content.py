"""Data files that are not what their names say are refused as a whole, with the remedy."""

from __future__ import annotations

import gzip

import pytest

from mkd.data.records.rows import read_rows
from mkd.errors import DataError
from tests.reported import refused

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
ROW = b'{"text": "a fox"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((f"a{suffix}", POINTER, "Git LFS") for suffix in (".jsonl", ".txt", ".parquet", ".jsonl.gz")),
        ("a.jsonl", gzip.compress(ROW), "compressed with gzip"),
        ("a.json", b"PAR1abc", "a Parquet file"),
        ("a.parquet", b"<html>", "a page of HTML"),
        ("a.jsonl", ROW.decode().encode("utf-16"), "UTF-16"),
        ("a.jsonl.zst", gzip.compress(ROW), "compressed with gzip"),
    ],
)
def test_refused(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refused("data-file-unreadable: its name says how it is read", DataError) as caught:
        list(read_rows(tmp_path / name))
    assert says in caught.value.what and caught.value.do


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", ROW), ("a.jsonl.gz", gzip.compress(ROW)), ("a.txt", b"<html>\n"), ("a.txt", b"P")],
)
def test_read(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert len(list(read_rows(tmp_path / name))) == 1
