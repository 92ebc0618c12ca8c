"""A folder, a pattern and a data set of the hub are one corpus each: as one file with all their records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import huggingface_hub.constants
import numpy as np

from mkd.data.prompts import read_prompts
from tests.data.datasets import open_datasets
from tests.data.files.test_hub_sets import write_cached
from tests.reported import reports

ROWS = [{"prompt": f"fox {i}", "completion": f" runs {i * i}"} for i in range(60)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
BAD = b"{broken\n"


def open_(tokenizer, cache: Path, *data_path, **options):
    options = dict(seq_length=32, vocab_size=350, cache_dir=str(cache)) | options
    return open_datasets(data_path=[str(one) for one in data_path], tokenizer=tokenizer, **options)[0]


def packs(dataset) -> list[np.ndarray]:
    found = [dataset[i] for i in range(len(dataset))]
    return [array for pack in found for array in (pack.tokens, pack.labels, pack.loss_mask)]


def test_a_folder_is_the_corpus_of_its_records(tokenizer, tmp_path):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(LINES[:20]) + BAD))
    (folder / "b.jsonl").write_bytes(BAD + b"".join(LINES[20:50]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(LINES[50:])))
    (tmp_path / "all.jsonl").write_bytes(b"".join(LINES))
    expected = packs(open_(tokenizer, cache, tmp_path / "all.jsonl"))
    once = dict(max_bad_records=1, quarantine=str(tmp_path / "bad.jsonl"))  # in each file
    found = open_(tokenizer, cache, folder, **once)
    np.testing.assert_equal(packs(found), expected)
    bad = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(Path(one["file"]).name, one["line"]) for one in bad] == [("a.jsonl.gz", 21), ("b.jsonl", 1)]
    store = found.members[0].store
    assert store.places([0, 20, 59]) == [(str(folder / "a.jsonl.gz"), 1), (str(folder / "b.jsonl"), 2),
                                         (str(folder / "c.jsonl.gz"), 10)]  # fmt: skip
    made = sorted(cache.glob("data-*.bin"))
    np.testing.assert_equal(packs(open_(tokenizer, cache, f"{folder}/*", **once)), expected)
    assert sorted(cache.glob("data-*.bin")) == made  # of the same content
    for index, weights in ((0, ("3", folder)), (1, ("1", tmp_path / "all.jsonl", "3", folder))):
        blend = open_(tokenizer, cache, *weights, **once)
        assert blend.members[index].store.prefix == store.prefix
    (folder / "d.jsonl").write_bytes(LINES[0])
    assert len(open_(tokenizer, cache, folder, **once).members[0].store) == 61
    assert len(sorted(cache.glob("data-*.idx"))) == len(sorted(cache.glob("data-*.meta.json"))) == 2


def test_damage_in_a_later_file_and_a_limit_for_each_file(tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"".join(LINES[:20]) + BAD * 2)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(LINES))[:-9])
    cache = tmp_path / "cache"
    errors = []
    for limit in (1, 2):
        try:
            open_(tokenizer, cache, folder, max_bad_records=limit)
        except Exception as error:
            errors.append(reports(error))
    assert "too-many-bad-records: 2 bad records" in errors[0]
    assert "data-file-unreadable: b.jsonl.gz is no intact .gz file" in errors[1]


def test_a_data_set_of_the_hub_is_a_corpus_and_a_source_of_prompts(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    shards = {f"data/train-{i:05d}-of-00003.jsonl": b"".join(LINES[20 * i :][:20]).decode() for i in range(3)}
    write_cached(tmp_path / "hub", "org/foxes", shards)
    (tmp_path / "all.jsonl").write_bytes(b"".join(LINES))
    cache = tmp_path / "cache"
    expected = packs(open_(tokenizer, cache, tmp_path / "all.jsonl"))
    np.testing.assert_equal(packs(open_(tokenizer, cache, "hub:org/foxes")), expected)
    assert [path.name[:10] for path in cache.glob("org-*.idx")] == ["org-foxes-"]
    read = read_prompts(["hub:org/foxes:train"], tokenizer, 32, 350)
    assert [one.fields["completion"] for one in read.prompts] == [row["completion"] for row in ROWS]
