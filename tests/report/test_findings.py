from __future__ import annotations

import math

from mkd.report.findings import changes, compare_settings, direction_of, figures, summary
from mkd.report.run_folder import open_runs
from tests.report.run_files import full_run, write_run


def test_every_evaluation_before_and_after(tmp_path):
    """Teachers stand beside the student's metric; what training cannot change is left out."""
    runs = open_runs([full_run(tmp_path / "a"), full_run(tmp_path / "b", temperature=2.0)])
    found = {(one.run, one.split, one.key): one for one in changes(runs)}
    keys = [("valid", "kd_loss"), ("valid/code", "kd_loss"), ("tasks", "eval/mmlu/accuracy")]
    assert list(found) == [(run, *key) for key in keys for run in (0, 1)]
    kd = found[1, "valid", "kd_loss"]
    assert (
        kd.before == (0, 2.4) and kd.after == (100, 2 * (0.2 + math.exp(-100 / 30))) and kd.best == kd.after
    )
    assert kd.verdict == "better" and abs(kd.relative - (kd.after[1] / 2.4 - 1)) < 1e-12
    task = found[0, "tasks", "eval/mmlu/accuracy"]
    assert (task.before, task.after, task.best) == ((0, 0.4), (100, 0.5), (100, 0.5))
    assert task.verdict == "better" and task.teachers == [("big", 0.75)]


def test_a_run_that_got_worse_or_was_evaluated_once(tmp_path):
    values = [(0, 1.0, 0.5), (5, 0.25, 0.75), (10, 2.0, 0.25)]
    records = [{"iteration": i, "split": "valid", "ce_loss": x, "top1_agreement": y} for i, x, y in values]
    records.append({"iteration": 0, "split": "late", "ce_loss": 1.0, "teacher_ce": 3.0})
    (run,) = open_runs([write_run(tmp_path / "a", records)])
    by_key = {(one.split, one.key): one for one in changes([run])}
    assert len(by_key) == 3
    assert by_key["valid", "ce_loss"].best == (5, 0.25) and by_key["valid", "ce_loss"].verdict == "worse"
    assert by_key["valid", "top1_agreement"].best == (5, 0.75)
    assert by_key["valid", "top1_agreement"].verdict == "worse"
    assert by_key["late", "ce_loss"].after is None and by_key["late", "ce_loss"].verdict == ""


def test_directions():
    up, down, none = (
        ("top1_agreement/big", "eval/x/accuracy_norm"),
        ("kd_loss/a", "eval/x/ce"),
        ("grad_norm",),
    )
    assert [*map(direction_of, up + down + none)] == [1, 1, -1, -1, 0]


def test_planned_and_measured(tmp_path):
    """The measured time is the median without the first record, which is 500 ms here."""
    runs = open_runs([full_run(tmp_path / "a"), write_run(tmp_path / "b", [{"iteration": 1, "loss": 1.0}])])
    found = {(one.run, one.key): one for one in figures(runs)}
    assert set(found) == {(0, "step_time_ms"), (0, "tokens_per_s_per_gpu")}
    assert (found[0, "step_time_ms"].planned, found[0, "step_time_ms"].measured) == (100, 201)
    assert found[0, "step_time_ms"].ratio == 2.01 and found[0, "tokens_per_s_per_gpu"].ratio == 0.5


def test_settings_that_differ_and_settings_that_were_given(tmp_path):
    a, b = full_run(tmp_path / "a"), full_run(tmp_path / "b", temperature=2.0)
    with (b / "config.yaml").open("a") as file:
        file.write("newer: 1  # default\nnewer_and_set: 2  # --newer-and-set\n")
    found = {one.path: one for one in compare_settings(open_runs([a, b]))}
    assert [path for path, one in found.items() if one.differs] == ["kd.kd_temperature", "newer_and_set"]
    assert found["newer_and_set"].cells == [None, (2, "--newer-and-set")]
    assert [path for path, one in found.items() if not one.is_set] == [
        "teachers[0].xtoken.loss",
        "training.micro_batch_size",
        "dry_run",
    ]


def test_the_summary_of_a_run(tmp_path):
    (run,) = open_runs([full_run(tmp_path / "a")])
    found = dict(summary(run))
    assert found["held-out KD loss"] == "1.2 \u2192 0.2357" and found["tokens/s per GPU"] == "20,480"
    assert found["tokens"] == "409,600"
