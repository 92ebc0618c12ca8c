"""Check that records need a context for the teachers of their tags alone, and what is said without any."""

from __future__ import annotations

import json

import pytest

from tests.reported import reported_codes
from tests.train.command import read_metrics, run_main, write_records
from tests.train.context_run import HINT, NUM_RECORDS, argv, make_files, record_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("context_tags"))


def routed(files, missing: str, tags: tuple[str, ...] = ("a",)):
    """Return the configuration of a teacher with a context for `tags`, and one without for the others."""
    teachers = [
        {"hf": str(files / "teacher"), "name": "knows", "context": {"user": HINT, "missing": missing}}
        | {"tags": tags},
        {"hf": str(files / "student"), "name": "plain"},
    ]
    config = files / f"{missing} {' '.join(tags)}.yaml"
    kd = {"teacher_combination": "route", "tag_key": "kind"}
    config.write_text(json.dumps({"teachers": teachers, "kd": kd}))
    return config


def test_records_of_other_tags_need_no_context(files, ranks):
    """A file of another tag alone has nothing for the teacher; the others have the same loss as with skip."""
    plain = ("prompt", "completion", "messages")
    own = [record_of(i) | {"kind": "a"} for i in range(NUM_RECORDS) if i % 4 != 3]
    others = [{k: v for k, v in record_of(i).items() if k in plain} | {"kind": "b"} for i in range(6)]
    data = write_records(files / "mixed.jsonl", *own, *others), write_records(files / "b.jsonl", *others)
    losses = {}
    for missing in ("error", "skip"):
        name = f"tags {missing}"
        words = argv(files, name, "--no-save", "--data-path", *data, config=routed(files, missing))
        (result,) = run_main(ranks, words)
        assert result.exit_code == 0, result.stderr
        losses[missing] = [
            [line[key] for key in ("loss", "kd_loss/a", "kd_loss/b", "num_aligned/knows")]
            for line in read_metrics(files / name)
        ]
        assert "6 records of other tags" in result.stdout and "without a context" not in result.stdout
    assert losses["error"] == losses["skip"] and len(losses["skip"]) == 4
    assert sum(count for *_, count in losses["skip"]) > 0
    write_records(files / "lacking.jsonl", *own, others[0] | {"kind": "a"}, *others)
    words = argv(files, "lacking", "--data-path", files / "lacking.jsonl", config=routed(files, "error"))
    (result,) = run_main(ranks, words)
    assert [one.partition(":")[0] for one in reported_codes(result.stderr)] == ["record-value-not-valid"]
    assert "no context for the teacher knows" in result.stderr


def test_data_without_any_context_is_one_clear_error(files, ranks):
    bare = write_records(files / "bare.jsonl", *({"prompt": f"{i} a", "completion": " b"} for i in range(4)))
    for more in (("--valid-data-path", bare, "--eval-interval", 2), ("--data-path", bare)):
        first, second = run_main(ranks, argv(files, "bare", *more), 2)
        assert first.exit_code == second.exit_code == 65
        assert reported_codes(first.stderr) == ["record-value-not-valid: has a context for the teacher"]
        assert reported_codes(second.stderr) == [], "one rank says it"
        assert "bare.jsonl" in first.stderr and "--valid-data-path" in first.stderr
    tagged = write_records(files / "bare b.jsonl", *({"text": "the fox", "kind": "b"} for _ in range(4)))
    own = [record_of(i) | {"kind": "a"} for i in range(NUM_RECORDS) if i % 4 != 3]
    words = ("--data-path", write_records(files / "own.jsonl", *own), "--valid-data-path", tagged)
    config = routed(files, "skip")
    words = argv(files, "other", *words, "--eval-interval", 2, "--no-save", config=config)
    (result,) = run_main(ranks, words)
    assert result.exit_code == 0, result.stderr
