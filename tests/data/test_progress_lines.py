"""Lines on how much of the data is prepared: none for a short task, then now and then, with what is left."""

from __future__ import annotations

import logging

import pytest

from mkd.data import progress_lines as progress
from mkd.data.corpus.encoding import FileRows, encode_files
from mkd.data.corpus.store_builder import build_store
from mkd.data.progress_lines import ProgressLines, total_megabytes


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only item is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_after_three_seconds_then_every_ten(clock, caplog):
    caplog.set_level(logging.INFO, "mkd")
    lines = ProgressLines("tokenising a.jsonl", 80, "MB", "records")
    for second in range(1, 41):
        clock[0] = 100.0 + second
        lines.at(2 * second, 500)
    lines.end()
    assert caplog.messages == [
        "tokenising a.jsonl: 6 of 80 MB, 500 records/s, 37 s left",
        "tokenising a.jsonl: 26 of 80 MB, 500 records/s, 27 s left",
        "tokenising a.jsonl: 46 of 80 MB, 500 records/s, 17 s left",
        "tokenising a.jsonl: 66 of 80 MB, 500 records/s, 7 s left",
        "tokenising a.jsonl: 20,000 records done in 40 s",
    ]
    caplog.clear()
    short = ProgressLines("packing", 3, "parts")
    for second in (0.5, 1.5, 2.9):
        clock[0] = 140.0 + second
        short.step()
    short.end()
    assert caplog.messages == []


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet", "arrow"])
def test_all_of_every_file_is_read_at_the_end(suffix, tmp_path, write_jsonl, tokenizer):
    texts = [f"The quick brown fox {i}" * (i % 5 + 1) for i in range(300)]
    paths = [str(tmp_path / f"{name}.{suffix}") for name in "ab"]
    for path in paths:
        if suffix == "jsonl":
            write_jsonl(path, *({"text": text} for text in texts))
        elif suffix == "txt":
            with open(path, "w") as file:
                file.write("\n".join(texts) + "\n")
        else:
            write_table(path, texts)
    read = [batch.megabytes_read for batch in FileRows(paths)]
    assert read == sorted(read) and read[0] > 0
    assert read[-1] == pytest.approx(total_megabytes(paths), rel=0.02)
    encoded = list(encode_files(paths, tokenizer, True))
    assert sum(batch.num_rows for batch in encoded) == 600 and encoded[-1].megabytes_read == read[-1]


def write_table(path, texts):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": texts})
    if path.endswith("parquet"):
        pq.write_table(table, path)
    else:
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)


def test_a_build_says_how_far_it_is(tmp_path, write_jsonl, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    monkeypatch.setattr(progress, "REPORT_S", 0.0)
    caplog.set_level(logging.INFO, "mkd")
    path = write_jsonl("a.jsonl", *({"text": f"fox {i}" * 3000} for i in range(130)))
    build_store([path], str(tmp_path / "out" / "c"), tokenizer, True)
    first, second, third, last = [one for one in caplog.messages if one.startswith(f"tokenising {path}: ")]
    assert "1 of 2 MB, " in first and " records/s, " in first and first.endswith(" left")
    assert "2 of 2 MB, " in third and last.startswith(f"tokenising {path}: 130 records done in ")
