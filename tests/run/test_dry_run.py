"""Check the verdict at the end of a dry run, and that held-out data is evaluated."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.errors import ErrorList
from mkd.operations.disk import Written, checkpoints_to_stay, disk_problems
from mkd.run.dry_run import verdict_text
from mkd.run.plan_run import plan_run
from mkd.run.plan_text import plan_text
from tests.reported import reports
from tests.train.command import flags, make_files, write_records


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("dry run"))


def verdict(files, *more, **paths) -> dict[str, str]:
    """Return the rows of the verdict by their names; the head is the first."""
    plan = plan_run(load_config(flags(files, "dry", *more, **paths)).config, 1)
    head, *rows = verdict_text(plan).splitlines()
    return {"head": head} | dict(row.split(maxsplit=1) for row in rows)


def test_a_new_run_says_what_it_will_do(files):
    save, hf = files / "new", files / "new hf"
    rows = verdict(files, "--train-iters", 100, "--save", save, "--save-interval", 10, "--export-hf", hf)
    assert rows["head"] == "dry run: OK, the run can start" and rows["start"] == "new run of 100 steps"
    assert str(save) in rows["saves"] and "every 10 steps" in rows["saves"] and str(hf) in rows["saves"]
    assert rows["takes"].startswith("12,800 tokens in 100 steps; ")
    assert " free: a checkpoint" in rows["disk"] and "the exported student" in rows["disk"]


def test_a_resumed_run_counts_from_its_checkpoint(files):
    folder = files / "resumed"
    (folder / "iter_0000040").mkdir(parents=True)
    (folder / "iter_0000040" / "manifest.json").write_text("{}")
    rows = verdict(files, "--train-iters", 100, "--save", folder, "--load", folder)
    assert rows["start"] == f"resumes from iteration 40 in {folder}, up to 100"
    assert rows["takes"].startswith("7,680 tokens in 60 steps; ")
    empty = files / "empty"
    rows = verdict(files, "--train-iters", 100, "--save", empty, "--load", empty)
    assert rows["start"] == f"new run of 100 steps; --load {empty} holds no checkpoint yet"


@pytest.mark.parametrize("pointer, start", [("20", 20), ("30", 20), ("?", 40)])
def test_after_a_rewind_it_names_the_checkpoint_of_the_pointer(pointer, start, files, tmp_path):
    """As a run chooses: the one that the pointer names; if it is lost, the newest before it."""
    for iteration in (20, 40):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(pointer)
    more = ("--train-iters", 100, "--save", tmp_path, "--save-interval", 10, "--load", tmp_path)
    assert verdict(files, *more)["start"] == f"resumes from iteration {start} in {tmp_path}, up to 100"
    assert checkpoints_to_stay(load_config(flags(files, "dry", *more)).config) == (100 - start) / 10


def test_held_out_data_is_evaluated_without_an_interval(files):
    """At the start and at the end; --eval-interval 0 means never, and the verdict says what that costs."""
    valid = ("--valid-data-path", files / "text.jsonl", "--train-iters", 100)
    ends = "held-out text before the first step and after the last"
    assert verdict(files, *valid)["evaluates"].startswith(ends)
    assert verdict(files, "--split", "90,10,0", "--train-iters", 100)["evaluates"].startswith(ends)
    assert ", every 7 steps and after" in verdict(files, *valid, "--eval-interval", 7)["evaluates"]
    assert "--valid-data-path is not used" in verdict(files, *valid, "--eval-interval", 0)["evaluates"]
    assert verdict(files, "--train-iters", 100)["evaluates"].startswith("nothing; --valid-data-path or")
    assert load_config(["--train-iters", "9"]).config.training.eval_interval is None


def test_a_run_that_does_not_fit_is_not_ok(files):
    head = verdict(files, "--device-memory-gib", 0.5)["head"]
    assert head.startswith("dry run: NOT OK: pipeline rank 0 needs ") and "0.5" in head


@pytest.mark.parametrize(
    ("records", "line", "codes"),
    [
        (["{"] * 20, ":1: ", ["record-not-json: not valid JSON"]),
        ([{"txt": "a"}] * 3, ":1: ", ["record-without-known-keys"]),
        ([], " is empty", ["data-file-empty: is empty"]),
        ([{"text": "a"}, '{"text": "cut o', {"text": "b"}], ":2: ", ["record-not-json: not valid JSON"]),
        (
            [{"text": "a"}, "{", "{"],
            ":2: ",
            [*["record-not-json: not valid JSON"] * 2, "too-many-bad-records"],
        ),
        ([{"text": "a"}] * 100 + ["{"], "", []),  # the run itself reads the rest
    ],
)
def test_the_first_hundred_records_are_checked(records, line, codes, files, tmp_path):
    path = write_records(tmp_path / "data.jsonl", *records)
    found: list = []
    try:
        plan_run(load_config(flags(files, "records", data_path=path)).config, 1)
    except ErrorList as error:
        found = error.errors
    assert reports(found) == codes
    assert not found or found[0].what.startswith(f"--data-path {path}{line}")
    if codes[1:]:
        verdict(files, "--max-bad-records", 2, data_path=path)


def test_swapped_models_are_noticed(files):
    note = "are --teacher-hf and --student-hf swapped?"
    plans = [
        plan_run(load_config(flags(files, "swap", **paths)).config, 1)
        for paths in ({}, dict(student_hf="teacher", teacher_hf="student"))
    ]
    assert [note in plan_text(plan) for plan in plans] == [False, True]


def test_a_disk_that_takes_nothing_more_is_a_problem():
    """As a full disk or a quota: /proc accepts no files, even from root."""
    from pathlib import Path

    (error,) = disk_problems([Written("metrics", "--log-dir", Path("/proc/runs/one"))])
    assert error.code == "not-writable" and "choose another --log-dir" in error.do
