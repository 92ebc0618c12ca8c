"""The amount of text that `mkd init` finds does not depend on how its files are stored."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import astuple

import huggingface_hub.constants
import pytest

from mkd.recipe.survey import READ_BYTES, survey
from tests.data.files.test_hub_sets import write_cached

HEX = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(1000)]
LINES = [json.dumps({"text": " ".join(HEX[i % 900 :][: i % 40 + 1])}) + "\n" for i in range(6000)]


def test_compressed_text_counts_as_the_text_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "text.jsonl").write_text("".join(LINES))
    assert (tmp_path / "text.jsonl").stat().st_size > READ_BYTES
    expected = survey((str(tmp_path / "text.jsonl"),))
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress("".join(LINES[i::20]).encode()))
    write_cached(tmp_path / "hub", "org/set", {f"train/{i}.jsonl": "".join(LINES[i::4]) for i in range(4)})
    for path in (str(folder), f"{folder}/*.gz", "hub:org/set"):
        assert astuple(survey((path,))) == pytest.approx(astuple(expected), rel=0.06), path
