"""Folders and patterns: which files are read, in which order, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from mkd.config.data_files import is_raw
from mkd.data.corpus.sources import find_prefix
from mkd.data.files.hub_sets import HubFiles, Listing
from mkd.data.files.named_files import NamedFiles, named_files
from mkd.errors import EXIT_DATA
from tests.reported import refused


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "fox"}\n')
    return folder


@pytest.mark.parametrize(
    "files, read",
    [
        (
            ("b.jsonl", "a.jsonl.gz", "B.jsonl", "README.md", ".hidden.jsonl", "_SUCCESS"),
            "B.jsonl a.jsonl.gz b.jsonl",
        ),
        (("part-10.txt", "part-2.txt", "more/c.txt"), "part-10.txt part-2.txt"),
        (
            ("data-00001-of-00002.arrow", "data-00000-of-00002.arrow", "dataset_info.json", "state.json"),
            "data-00000-of-00002.arrow data-00001-of-00002.arrow",
        ),
    ],
)
def test_a_folder_gives_its_files_by_name(files, read, tmp_path):
    folder = make(tmp_path / "data.v1", *files)
    found = named_files(str(folder), "--data-path")
    assert [Path(name).name for name in found.names] == read.split() and is_raw(str(folder))
    assert found.describe().startswith(f"{folder} is {len(found.names)} files: ")
    assert found.cache_name == "data.v1" and named_files(f"{folder}/", "").cache_name == "data.v1"


@pytest.mark.parametrize(
    "files, code, told",
    [
        (("a.jsonl", "b.parquet"), "data-files-unclear: 1 file .jsonl, 1 file .parquet", "name one kind"),
        (("a.jsonl", "b.json"), "data-files-unclear: several kinds", "{}/*.json"),
        (("a.jsonl", "b.jsonl", "b.csv"), "data-files-unclear: 1 file .csv, 2 files .jsonl", "{}/*.jsonl*"),
        (("a.jsonl", "b.csv.gz"), "data-files-unclear: 1 file .gz, 1 file .jsonl", "{}/*.jsonl*"),
        (("a.jsonl", "b.JSONL"), "data-files-unclear: 1 file .JSONL, 1 file .jsonl", "{}/*.jsonl*"),
        (("a.jsonl.gz", "b.jsonl.gz.part"), "data-files-unclear: 1 file .part", "{}/*.jsonl*"),
        (("a.jsonl", "a.jsonl.gz"), "data-files-unclear: a.jsonl and ", "remove one of them"),
        (
            ("dataset_dict.json", "test/d.arrow", "train/d.arrow"),
            "data-path-not-found: no files",
            "{}/train, or",
        ),
        (("c.bin", "c.idx", "c.meta.json"), "data-path-not-found: no files", "such as {}/c"),
        (("model.safetensors",), "data-path-not-found: no files", "name files that end in .jsonl"),
    ],
)
def test_a_folder_that_does_not_say_what_to_read(files, code, told, tmp_path):
    folder = make(tmp_path / "data", *files)
    (folder / "c.meta.json").unlink(missing_ok=True)
    with refused(code) as caught:
        named_files(str(folder), "--data-path")
    assert told.format(folder) in caught.value.do and caught.value.exit_code == EXIT_DATA


def test_patterns(tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path, "x/b.jsonl", "x/a.jsonl", "y/z/c.jsonl", "e[1].jsonl", "c.bin", "c.idx"))
    assert named_files("*/*.jsonl", "").names == ("x/a.jsonl", "x/b.jsonl")
    assert named_files("[xy]/**/*.jsonl", "").names == ("x/a.jsonl", "x/b.jsonl", "y/z/c.jsonl")
    assert named_files("e[1].jsonl", "").names == ("e[1].jsonl",)  # the file of this name
    assert is_raw("x/*") and not is_raw("c") and not is_raw("c.bin")
    with refused("data-path-not-found: *.parquet: no file matches"):
        named_files("*.parquet", "--data-path")
    with refused("data-file-kind-unknown: c.bin, c.idx, and no file of records") as caught:
        named_files("c.*", "--data-path")
    assert "by their prefixes" in caught.value.do


def test_what_is_not_there(tmp_path):
    with refused("data-path-not-found: nothing found") as caught:
        find_prefix("HuggingFaceH4/ultrachat_200k")
    assert "--data-path hub:HuggingFaceH4/ultrachat_200k" in caught.value.do
    with refused("data-path-not-found: missing.jsonl: nothing found") as caught:
        named_files(str(tmp_path / "missing.jsonl"), "--data-path")
    assert "hub" not in caught.value.do


def test_the_size_of_text_is_not_that_of_the_file(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fox"}\n' * 10_000))
    assert named_files(str(tmp_path), "").text_bytes == 160_000


def test_the_hub_tells_sizes_of_compressed_files(tmp_path):
    first = tmp_path / "0.jsonl.gz"
    first.write_bytes(gzip.compress(b'{"text": "fox"}\n' * 10_000))
    names = ("0.jsonl.gz", "1.jsonl.gz", "2.jsonl.gz")
    listing = Listing("commit", "main", dict.fromkeys(names, first.stat().st_size), is_cached=False)
    files = NamedFiles("hub:org/set", names, HubFiles("org/set", listing, names, "default, train"))
    assert files.growth([str(first)]) == 3
