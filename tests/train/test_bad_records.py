"""Train on a file with bad records: exit code 65 that names them, or a run without them and a list."""

from __future__ import annotations

import json

import pytest

from mkd.errors import EXIT_DATA, EXIT_USAGE
from tests.reported import reported_codes
from tests.train.command import flags, make_files, read_metrics, run_main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("bad records"))
    lines = (folder / "text.jsonl").read_bytes().splitlines()
    (folder / "bad.jsonl").write_bytes(b"\n".join([*lines[:5], b'{"text": "cut', *lines[5:], b"\0\0", b""]))
    return folder


@pytest.mark.fault(24)
def test_the_first_ones_are_named(files, ranks):
    results = run_main(
        ranks, flags(files, "refused", "--max-bad-records", 1, data_path="bad.jsonl"), world_size=2
    )
    assert [result.exit_code for result in results] == [EXIT_DATA] * 2
    assert "too-many-bad-records" in reported_codes(results[0].stderr)
    for place in ("bad.jsonl:6: ", "bad.jsonl:62: "):
        assert place in results[0].stderr
    (result,) = run_main(ranks, flags(files, "usage", "--max-bad-records", -1, data_path="bad.jsonl"))
    assert result.exit_code == EXIT_USAGE and "out-of-range: must be" in reported_codes(result.stderr)


@pytest.mark.fault(24)
def test_the_run_goes_on_without_them(files, ranks):
    (result,) = run_main(ranks, flags(files, "run", "--max-bad-records", 2, data_path="bad.jsonl"))
    assert result.exit_code == 0, result.stderr
    listed = files / "run" / "quarantine.jsonl"
    assert f"2 bad records skipped, listed in {listed}" in result.stdout
    entries = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in entries] == [
        (str(files / "bad.jsonl"), line) for line in (6, 62)
    ]
    (plain,) = run_main(ranks, flags(files, "plain"))
    losses = [[line["loss"] for line in read_metrics(files / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1] and len(losses[0]) == 2, "as with a file of the good records"
    assert not (files / "plain" / "quarantine.jsonl").exists() and plain.exit_code == 0
