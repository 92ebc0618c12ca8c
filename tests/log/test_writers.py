import json
import math

import pytest

from mkd.log.writers import JsonlWriter, MetricLogger


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_that_can_be_read_at_once(tmp_path):
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write({"iteration": 1, "loss": 0.1 + 0.2})
    assert lines_of(writer.path) == [{"iteration": 1, "loss": 0.1 + 0.2}]  # before close, without rounding
    writer.write({"iteration": 1, "split": "valid", "loss": -1.0})
    writer.close()
    assert lines_of(writer.path)[1] == {"iteration": 1, "split": "valid", "loss": -1.0}


def test_values_that_json_lacks_are_null(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(
        {"iteration": 1, "loss": math.nan, "ce_loss": math.inf, "kd_loss": -math.inf, "grad_norm": 1.0}
    )
    writer.close()
    assert "NaN" not in writer.path.read_text()
    assert lines_of(writer.path) == [
        {"iteration": 1, "loss": None, "ce_loss": None, "kd_loss": None, "grad_norm": 1.0}
    ]


def test_opening_keeps_what_is_there_but_an_unfinished_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2, "lo')
    writer = JsonlWriter(path)
    writer.write({"iteration": 2})
    writer.close()
    assert lines_of(path) == [{"iteration": 1}, {"iteration": 2}]


def test_resume_drops_later_lines_of_every_split(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for iteration in (1, 2, 3, 4):
        writer.write({"iteration": iteration})
    writer.write({"iteration": 2, "split": "valid"})
    writer.write({"iteration": 4, "split": "valid"})
    writer.truncate_after(2)
    writer.write({"iteration": 3, "loss": 7.0})
    writer.close()
    assert lines_of(path) == [
        {"iteration": 1},
        {"iteration": 2},
        {"iteration": 2, "split": "valid"},
        {"iteration": 3, "loss": 7.0},
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_with_nothing_to_drop_leaves_the_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"iteration": 2})
    before = path.stat()
    writer.truncate_after(2)
    writer.close()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damage", ["not json", "[1]", '{"loss": 1.0}', '{"iteration": null}', "\xff"])
def test_resume_drops_lines_that_are_no_records(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n' + damage.encode("latin-1") + b'\n{"iteration": 2}\n')
    writer = JsonlWriter(path)
    writer.truncate_after(9)
    writer.close()
    assert lines_of(path) == [{"iteration": 1}, {"iteration": 2}]


def test_the_logger_of_silent_ranks_writes_nothing(tmp_path):
    silent = MetricLogger()
    silent.write({"iteration": 1})
    silent.truncate_after(0)
    silent.close()
