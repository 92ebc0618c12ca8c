from __future__ import annotations

import json
import math

import numpy as np

from mkd.report.columns import plot_data, split_columns


def records(values):
    return [{"iteration": i, "consumed_tokens": 10 * i, "loss": value} for i, value in enumerate(values, 1)]


def test_splits_keys_and_values_that_are_no_number():
    found = split_columns(
        [
            {"iteration": 1, "loss": 3.0, "kd_loss/old": 1},
            {"iteration": 1, "split": "tasks", "eval/a/ce": 2.0},
            {"iteration": 1, "split": "valid/code", "loss": 1.0},
            {"iteration": 2, "loss": None, "kd_loss/new": 2, "never": None},
            {"iteration": 3, "loss": math.inf, "text": "x", "flag": True},
            {"iteration": 4, "loss": 1.5},
        ]
    )
    assert list(found) == ["train", "valid/code", "tasks"]
    train = found["train"]
    assert train.keys == ["loss", "kd_loss/old", "kd_loss/new"]
    assert train.points("loss") == [(1, 3.0), (4, 1.5)]
    assert train.points("kd_loss/new") == [(2, 2.0)] and train.points("absent") == []
    assert plot_data(train, 100)["series"]["loss"] == [3, None, None, 1.5]


def test_a_whole_number_beyond_floats_is_a_gap():
    split = split_columns([{"iteration": 1, "loss": 10**400}, {"iteration": 2, "loss": 3.0}])["train"]
    assert split.points("loss") == [(2, 3.0)]


def test_of_repeated_iterations_the_last_record_counts_and_order_does_not():
    steps = [(1, 9.0), (2, 9.0), (3, 9.0), (2, 5.0), (3, 4.0), (4, 3.0)]  # resumed from iteration 1
    split = split_columns([{"iteration": step, "loss": value} for step, value in steps])["train"]
    assert split.points("loss") == [(1, 9.0), (2, 5.0), (3, 4.0), (4, 3.0)]
    assert split.num_repeated == 2


def test_buckets_are_means_between_extremes():
    """Compare with loops over the records; the last bucket is shorter, and one has no number at all."""
    values = np.random.default_rng(0).normal(size=103)
    values[20:40] = math.nan
    values[50] = math.inf
    data = plot_data(split_columns(records(values.tolist()))["train"], max_points=11)
    assert data["bucket"] == 10 and data["x"]["iteration"] == [*range(10, 101, 10), 103]
    assert data["x"]["consumed_tokens"] == [*range(100, 1001, 100), 1030]
    for place in range(11):
        part = [one for one in values[10 * place : 10 * place + 10].tolist() if math.isfinite(one)]
        got = [data[name]["loss"][place] for name in ("low", "series", "high")]
        if part:
            assert np.allclose(got, [min(part), sum(part) / len(part), max(part)], rtol=1e-5)
        else:
            assert got == [None] * 3 and place in (2, 3)
    json.dumps(data, allow_nan=False)


def test_short_runs_are_drawn_as_they_are():
    data = plot_data(split_columns(records([1.0, 1e-12, 123456789.0]))["train"], max_points=3)
    assert data["bucket"] == 1 and "low" not in data
    assert data["series"] == {"loss": [1, 1e-12, 123457000]}
