"""Check held-out tasks in a training run: when they are evaluated, what is written, what is refused early."""

from __future__ import annotations

import json

import pytest

from tests.evaluation.eval_reference import write_tasks
from tests.reported import reported_codes
from tests.train.command import flags, make_files, read_metrics, run_main, write_records

EVALUATED = ("--eval-interval", 1, "--seq-length", 128)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("eval_tasks_run"))
    write_tasks(folder)
    return folder


def tasks_of(files):
    paths = ("--eval-multiple-choice", files / "animals.jsonl", "--eval-completions", files / "foxes.jsonl")
    return (*paths, "--eval-num-fewshot", 1)


def test_records_before_the_first_step_and_at_every_interval(files, ranks):
    """Tasks are evaluated without held-out text too; the teacher is scored once."""
    results = run_main(ranks, flags(files, "alone", *EVALUATED, *tasks_of(files)))
    assert results[0].exit_code == 0, results[0].stderr
    records = [record for record in read_metrics(files / "alone") if record.get("split") == "tasks"]
    assert [(record["iteration"], record["consumed_samples"]) for record in records] == [
        (0, 0),
        (1, 4),
        (2, 8),
    ]
    for record in records:
        assert record["eval/foxes/num_completions"] == 5 and 0 <= record["eval/animals/accuracy_norm"] <= 1
    assert [("eval/foxes/teacher/ce" in record) for record in records] == [True, False, False]
    assert len({record["eval/foxes/ce"] for record in records}) == 3
    lines = results[0].stdout.splitlines()
    assert " foxes: 5 continuations, 1 prompt cut to 128 tokens" in lines
    line = next(line for line in lines if line.startswith(" task results at iteration 2 |"))
    assert f"| foxes/ce: {records[2]['eval/foxes/ce']:.6E} |" in line and "num_" not in line


def test_an_average_is_scored_at_every_interval(files, ranks):
    """With rate 1 it is the student, so its metrics are the student's."""
    config = files / "average.yaml"
    config.write_text(json.dumps({"teachers": [{"weights": "ema", "name": "mean", "ema": {"rate": 1}}]}))
    words = [*flags(files, "average", *EVALUATED, *tasks_of(files)), "--config", str(config)]
    place = words.index("--teacher-hf")
    del words[place : place + 2]
    (result,) = run_main(ranks, words)
    assert result.exit_code == 0, result.stderr
    records = [record for record in read_metrics(files / "average") if record.get("split") == "tasks"]
    assert [record["iteration"] for record in records] == [0, 1, 2]
    for record in records:
        for name in ("foxes/ce", "animals/accuracy_norm"):
            task, metric = name.split("/")
            assert record[f"eval/{task}/mean/{metric}"] == pytest.approx(record[f"eval/{name}"], rel=1e-6)
    assert len({record["eval/foxes/mean/ce"] for record in records}) == 3


def test_beside_held_out_text_and_in_two_processes(files, ranks):
    argv = flags(files, "both", *EVALUATED, *tasks_of(files), "--split", "80,20,0")
    results = run_main(ranks, argv, 2)
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    splits = [record.get("split") for record in read_metrics(files / "both")]
    assert splits == ["valid", "tasks", None, "valid", "tasks", None, "valid", "tasks"]


def test_a_bad_line_ends_the_run_before_it_starts(files, ranks):
    bad = write_records(
        files / "bad.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 3}
    )
    results = run_main(ranks, flags(files, "bad", *EVALUATED, "--eval-completions", bad), 2)
    assert [result.exit_code for result in results] == [65, 65]
    assert reported_codes(results[0].stderr) == ["record-field-not-text: is empty or not a text"]
    assert results[1].stderr == "" and not (files / "bad").exists()
