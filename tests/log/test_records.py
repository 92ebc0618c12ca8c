from __future__ import annotations

import pytest

from mkd.log.records import curve, read_records, split_of
from mkd.log.writers import JsonlWriter
from tests.reported import refused


def test_what_a_writer_wrote_is_read_back_from_file_or_folder(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    records = [
        {"iteration": 1, "loss": 2.5},
        {"iteration": 1, "split": "valid", "loss": 2.0},
        {"iteration": 2, "loss": None},
    ]
    for record in records:
        writer.write(record)
    assert read_records(tmp_path) == read_records(tmp_path / "metrics.jsonl") == records
    assert [split_of(record) for record in records] == ["train", "valid", "train"]
    assert curve(records, "train", "loss") == {1: 2.5} and curve(records, "valid", "loss") == {1: 2.0}


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "lo')
    assert read_records(tmp_path) == [{"iteration": 1}]


NO_RECORDS = [
    "not json",
    "[1]",
    '{"loss": 1.0}',
    '{"iteration": null}',
    '{"iteration": 1, "split": ["valid"]}',
]


@pytest.mark.parametrize("line", NO_RECORDS)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 1}}\n{line}\n')
    with refused("metrics-unreadable: not a metrics record") as caught:
        read_records(tmp_path)
    assert caught.value.what.startswith(f"{tmp_path / 'metrics.jsonl'}:2: ")


def test_a_missing_run_is_named(tmp_path):
    with refused("metrics-unreadable"):
        read_records(tmp_path / "nowhere")
