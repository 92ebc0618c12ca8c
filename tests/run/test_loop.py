"""Checkpoints that a run saves by itself, and its metrics after a stop."""

from __future__ import annotations

import json

import pytest

from mkd.checkpoint.folders import saved_iterations
from tests.train.command import flags, make_files, read_metrics, run_main

TIMES = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("loop"))


def run_to(ranks, files, run, iterations, *more):
    save = ("--save", files / run, "--load", files / run, "--train-iters", iterations)
    (result,) = run_main(ranks, flags(files, run, *save, *more))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def lines_without_times(folder):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(folder)]


def causes(folder):
    """Return iteration -> why it was saved."""
    found = (path / "mkd.json" for path in saved_iterations(folder))
    return {int(path.parent.name[-7:]): json.loads(path.read_text())["cause"] for path in found}


def test_a_run_saves_by_time_and_at_its_end(files, ranks):
    run_to(ranks, files, "by time", 3, "--save-interval-in-mins", "1e-6")
    found = causes(files / "by time")
    assert found.pop(3) == "last" and set(found.values()) == {"time"}
    run_to(ranks, files, "never", 3, "--save-interval-in-mins", 0, "--save-interval", 2)
    assert causes(files / "never") == {2: "steps", 3: "last"}


def test_metrics_after_stops_are_those_of_a_run_that_never_stopped(files, ranks):
    more = ("--log-interval", 3, "--lr-decay-iters", 7)
    run_to(ranks, files, "whole", 7, *more)
    stop = ("--exit-duration-in-mins", "1e-6")  # after one step
    outputs = [run_to(ranks, files, "parts", 7, *more, *(stop if part < 4 else ())) for part in range(5)]
    assert causes(files / "parts") == {7: "last", 4: "stop"}
    assert ["resumed from iteration" in output for output in outputs] == [False, True, True, True, True]
    latest = files / "parts" / "iter_0000004"
    assert f"resumed from iteration 4 ({latest}, saved " in outputs[-1]
    whole, parts = (lines_without_times(files / run) for run in ("whole", "parts"))
    assert [line["iteration"] for line in whole] == [3, 6, 7] and parts == whole
