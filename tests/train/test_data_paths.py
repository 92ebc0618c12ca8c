"""A run on a folder of compressed files is the run on one file with their records, also after it resumes."""

from __future__ import annotations

import gzip

from mkd.errors import EXIT_CHECKPOINT, EXIT_DATA
from tests.reported import reported_codes
from tests.train.command import flags, make_files, read_metrics, run_main

KEYS = ("loss", "ce_loss", "kd_loss", "grad_norm", "num_loss_tokens")


def losses(folder) -> dict[int, list[float]]:
    lines = [line for line in read_metrics(folder) if "split" not in line]
    return {line["iteration"]: [line[key] for key in KEYS] for line in lines}


def test_a_folder_of_compressed_files_trains_and_resumes_as_one_file(ranks, tmp_path):
    files = make_files(tmp_path)
    lines = (files / "text.jsonl").read_bytes().splitlines(keepends=True)
    folder = files / "parts"
    folder.mkdir()
    for number, part in enumerate((lines[:10], lines[10:35], lines[35:])):
        (folder / f"part-{number}.jsonl.gz").write_bytes(gzip.compress(b"".join(part)))
    steady = ("--log-interval", "1", "--lr-decay-style", "constant")
    whole = flags(files, "whole", "--train-iters", "12", *steady)  # several epochs
    assert [one.exit_code for one in run_main(ranks, whole, 2)] == [0, 0]
    saved = ("--save", str(files / "saved"), "--load", str(files / "saved"), *steady)
    for steps in (5, 12):
        words = flags(files, "parts-log", *saved, "--train-iters", str(steps), data_path="parts")
        assert [one.exit_code for one in run_main(ranks, words, 2)] == [0, 0]
    assert losses(files / "parts-log") == losses(files / "whole") and len(losses(files / "whole")) == 12
    (folder / "part-3.jsonl.gz").write_bytes(gzip.compress(lines[0]))
    (result,) = run_main(ranks, words)
    assert result.exit_code == EXIT_CHECKPOINT and reported_codes(result.stderr) == [
        "run-differs: data.files"
    ]
    assert f"added: {folder / 'part-3.jsonl.gz'}" in result.stderr
    (folder / "part-3.jsonl").write_bytes(lines[0])
    (result,) = run_main(ranks, words)
    assert result.exit_code == EXIT_DATA and reported_codes(result.stderr) == ["data-files-unclear"]
