"""Data sets of the hub, from a cache as the hub's library writes it: nothing is asked over a network."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from mkd.data.files.hub_layout import matching, splits_by_name
from mkd.data.files.hub_sets import list_files
from mkd.data.files.named_files import named_files
from mkd.data.records.rows import read_rows
from tests.reported import refused

COMMIT = "0123456789abcdef0123456789abcdef01234567"
README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test.jsonl, main/more_test.jsonl]
- config_name: other
  data_dir: other
---
# A data set
"""


def write_cached(
    cache: Path, name: str, files: dict[str, str], ref: str = "main", commit: str = COMMIT
) -> None:
    """Write a data set into a hub's cache: blobs, links to them, and the commit of a branch."""
    folder = cache / f"datasets--{name.replace('/', '--')}"
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for number, (path, content) in enumerate(files.items()):
        blob, link = folder / "blobs" / f"{commit[:8]}{number}", folder / "snapshots" / commit / path
        for one in (blob, link):
            one.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(content)
        link.symlink_to(blob)


def records(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def texts(path: str) -> list[str]:
    """Return the texts of a path, as they are read."""
    files = named_files(path, "--data-path").local()
    return [json.loads(row)["text"] for file in files for _, row in read_rows(file)]


def test_configurations_and_splits_of_the_readme(cache):
    files = {
        "README.md": README,
        "main/train-1.jsonl": records("b"),
        "main/train-0.jsonl": records("a"),
        "main/more_test.jsonl": records("d"),
        "main/test.jsonl": records("c"),
        "other/dev.jsonl": records("e"),
        "other/train.jsonl": records("f"),
        "notes.jsonl": records("none"),
    }
    write_cached(cache, "org/name", files)
    assert texts("hub:org/name:main") == ["a", "b"]
    assert texts("hub:org/name:main:test") == ["c", "d"]  # in the README's order
    assert texts("hub:org/name:other:validation") == ["e"] and texts("hub:org/name:other") == ["f"]
    assert texts(f"hub:org/name@{COMMIT}:other") == ["f"] and texts("hub:org/name:main/*.jsonl") == [
        "d",
        "c",
        "a",
        "b",
    ]
    found = named_files("hub:org/name:main", "--data-path")
    assert found.cache_name == "org-name-main" and found.text_bytes == len(records("a", "b"))
    assert "2 files of main, train at commit 0123456789ab, from the cache" in found.describe()
    for path, told in {
        "hub:org/name": "configurations: main, other",
        "hub:org/name:train": "configurations: main, other",
        "hub:org/name:third:train": "configurations: main, other",
        "hub:org/name:main:valid": "splits of main: train, test",
        "hub:org/name:*.parquet": "files: README.md, main/more_test.jsonl",
    }.items():
        with refused(f"data-set-part-unknown: {told}"):
            named_files(path, "--data-path")
    with refused("data-set-part-unknown: does not name a data set of the hub"):
        named_files("hub:org/name:a:b:c", "--data-path")


def test_splits_by_names_and_files_that_are_missing(cache):
    shards = [(split, i) for split in ("train", "test_sft") for i in (0, 1)]
    files = {f"data/{split}-0000{i}-of-00002.jsonl": records(f"{split}{i}") for split, i in shards}
    write_cached(cache, "plain", files)
    assert texts("hub:plain") == ["train0", "train1"]
    assert texts("hub:plain:test_sft") == ["test_sft0", "test_sft1"]
    (cache / f"datasets--plain/snapshots/{COMMIT}/data/train-00001-of-00002.jsonl").unlink()
    list_files.cache_clear()
    with refused("data-set-not-found: data/train-00001-of-00002.jsonl"):
        named_files("hub:plain", "--data-path")
    with refused("data-set-not-found: there is no data set org/absent") as caught:
        named_files("hub:org/absent", "--data-path")
    assert "hf download org/absent" in caught.value.do and "HF_HUB_OFFLINE" in caught.value.why


def test_other_formats_are_read_from_the_parquet_copy_of_the_hub(cache, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_cached(cache, "org/csv", {"train.csv": "text\nfox\n"})
    with refused("data-file-kind-unknown: has no files that mkd reads"):
        named_files("hub:org/csv", "--data-path")
    list_files.cache_clear()
    pq.write_table(pa.table({"text": ["fox"]}), tmp_path / "t.parquet")
    write_cached(cache, "org/csv", {"default/train/0000.parquet": ""}, "refs/convert/parquet", COMMIT[::-1])
    link = cache / f"datasets--org--csv/snapshots/{COMMIT[::-1]}/default/train/0000.parquet"
    link.unlink()
    link.symlink_to(tmp_path / "t.parquet")
    (file,) = named_files("hub:org/csv", "--data-path").local()
    assert [row for _, row in read_rows(file)] == [{"text": "fox"}]


@pytest.mark.parametrize(
    "names, splits",
    [
        ("train.jsonl dev.jsonl eval/a.jsonl", {"test": "eval/a.jsonl"}),  # folders first, as datasets does
        (
            "x-train.jsonl valid_1.jsonl b.test.jsonl",
            {"train": "x-train.jsonl", "validation": "valid_1.jsonl", "test": "b.test.jsonl"},
        ),
        ("a.jsonl trained.jsonl", {"train": "a.jsonl trained.jsonl"}),
        ("train/b.txt train/a.txt dataset_infos.json", {"train": "train/a.txt train/b.txt"}),
        ("data/train-00000-of-00001.parquet train.jsonl", {"train": "data/train-00000-of-00001.parquet"}),
        ("README.md pictures.zip", {}),
    ],
)
def test_names_tell_the_split(names, splits):
    assert {split: " ".join(files) for split, files in splits_by_name(names.split()).items()} == splits


def test_a_held_out_split_is_read_only_where_it_is_named(cache):
    write_cached(cache, "org/held", {"data.jsonl": records("all"), "test.jsonl": records("t")})
    with refused("data-set-part-unknown: hub:org/held: default has no split train"):
        named_files("hub:org/held", "--data-path")
    assert texts("hub:org/held:test") == ["t"]


def test_patterns_of_a_readme():
    names = ["a/b.jsonl", "a/c/d.jsonl", "e.jsonl"]
    assert matching(names, "*.jsonl") == ("e.jsonl",) and matching(names, "**/*.jsonl") == tuple(names)
    assert matching(names, "a/**") == tuple(names[:2]) and matching(names, "[de].jsonl") == ("e.jsonl",)
