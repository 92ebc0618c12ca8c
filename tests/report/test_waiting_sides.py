"""The report says which side of a run waits, and what to change."""

from __future__ import annotations

import json

import pytest

from mkd.report.findings import summary
from mkd.report.run_folder import open_runs
from mkd.report.waiting_sides import sides_advice, waiting_shares
from tests.report.run_files import full_run, write_run

CONFIG = """teachers:
  -
    processes: {processes}  # --teacher-processes
"""


def run(folder, wait: float, idle: float, processes: int = 4, size: int = 8):
    """Return a run of four steps with these shares of a step; the first one warms up."""
    records = [{"iteration": 1, "loss": 1.0, "step_time_ms": 900, "teacher_wait_ms": 900}]
    shares = {"teacher_wait_ms": 200 * wait, "teacher_idle_share": idle}
    records += [{"iteration": step, "loss": 1.0, "step_time_ms": 200, **shares} for step in (2, 3, 4)]
    plan = json.dumps({"num_processes": size})
    config = CONFIG.format(processes=processes)
    (found,) = open_runs([write_run(folder, records, config_yaml=config, plan_json=plan)])
    return found


@pytest.mark.parametrize(
    ("wait", "idle", "words"),
    [
        (0.05, 0.1, None),
        (0.5, 0.02, "give its teachers more processes, about 5 of all; mkd plan"),
        (0.0, 0.75, "give its teachers fewer processes, about 2 of all; mkd plan"),
        (0.2, 0.3, "raise --teacher-ahead"),
    ],
)
def test_what_it_suggests(tmp_path, wait, idle, words):
    """With half of the processes and half of the time, the student has a third of the work: 8 x 2 / 3."""
    found = run(tmp_path / "run", wait, idle)
    assert waiting_shares(found) == pytest.approx((wait, idle))
    text = dict(summary(found))["student and teachers"]
    assert text.startswith(f"the student waits {wait:.0%} of a step, its teachers {idle:.0%}")
    assert (words in text) if words else text.endswith("%")


def test_a_split_that_cannot_be_more_even(tmp_path):
    text = sides_advice(run(tmp_path / "run", 0.3, 0.0, processes=1, size=2))
    assert text.endswith("its teachers 0%: no other split of these processes is more even")


def test_a_run_without_such_teachers_and_one_of_unknown_size(tmp_path):
    (other,) = open_runs([full_run(tmp_path / "shared")])
    assert sides_advice(other) is None and "student and teachers" not in dict(summary(other))
    assert "about" not in sides_advice(run(tmp_path / "unknown", 0.5, 0.0, size=0))
