"""Paths that are no files: the error says what a path is, and which names to give instead."""

from __future__ import annotations

import json

import pytest

from mkd.config.data_files import no_such_file, require_file
from mkd.data.corpus.sources import find_prefix
from mkd.errors import EXIT_DATA
from tests.reported import refused


@pytest.mark.parametrize(
    "files, told",
    [
        (("a.jsonl", "b.jsonl", "README.md"), "name its files: {}/*.jsonl"),
        (("a.parquet", "dataset_infos.json"), "name its files: {}/*.parquet"),
        (("data-00000-of-00001.arrow", "dataset_info.json", "state.json"), "name its files: {}/*.arrow"),
        (
            ("dataset_dict.json", "train/data-0.arrow", "test/data-0.arrow"),
            "name its files: {}/train/*.arrow",
        ),
        (("c.bin", "c.idx", "c.meta.json"), "name its tokenised corpora by their prefixes, such as {}/c"),
        (("model.safetensors",), "the folder has none"),
        ((), "the folder has none"),
    ],
)
def test_a_folder_names_the_files_to_give(files, told, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    for check in (require_file, find_prefix):
        with refused("data-path-not-a-file: is a folder") as caught:
            check(str(folder), "--data-path")
        assert told.format(folder) in caught.value.do and caught.value.exit_code == EXIT_DATA


def test_a_quoted_pattern_and_an_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    with refused("data-path-not-a-file: is a pattern, not a file") as caught:
        require_file("*.jsonl", "--data-path")
    assert "2 files match" in caught.value.why and caught.value.do.endswith("--data-path *.jsonl")
    assert "0 files match" in no_such_file("*.parquet", "--data-path").why
    with refused("data-path-not-found: nothing found") as caught:
        find_prefix("HuggingFaceH4/ultrachat_200k")
    assert "hf download HuggingFaceH4/ultrachat_200k --repo-type dataset" in caught.value.do
    assert "hub" not in no_such_file("data/missing.jsonl", "--data-path").do
