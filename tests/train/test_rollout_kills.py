"""A run with rollouts that is killed 20 times, as it samples, trains or saves, consumes each prompt once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_injection import environment
from tests.train.command import read_metrics, write_records
from tests.train.rollout_run import argv, make_files
from tests.train.test_resume import train_and_hash

ROOT = Path(__file__).parents[2]
POINTS = "in_rollout", "in_step", "in_optimizer", "before_pointer"
KILLS, STEPS = 20, 22
EXACT = "loss", "rollout/length", "rollout/entropy", "rollout/teacher_nll", "consumed_prompts"


def words(files: Path, run: str, *more: object) -> list[str]:
    """Return the command line of a run with one prompt a step; 22 prompts are an epoch."""
    flags = ("--rollout-prompts", 1, "--samples-per-prompt", 1, "--max-new-tokens", 6, "--log-interval", 1)
    return argv(files, run, *flags, "--train-iters", STEPS, "--save", files / run, *more)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make prompts whose numbers of tokens differ, so that a step's text names its prompt."""
    folder = make_files(tmp_path_factory.mktemp("kills"))
    write_records(
        folder / "prompts.jsonl", *({"prompt": "abcdefghijklmnopqrstuvwxyz"[:i]} for i in range(1, STEPS + 1))
    )
    return folder


def lines(files: Path, run: str) -> list[list[float]]:
    return [[line[name] for name in EXACT] for line in read_metrics(files / run)]


@pytest.fixture(scope="module")
def unbroken(files, ranks):
    ranks.run(train_and_hash, 1, words(files, "unbroken"))
    found = lines(files, "unbroken")
    assert [line[-1] for line in found] == list(range(1, STEPS + 1))
    assert len({line[0] for line in found}) == STEPS
    return found


@pytest.mark.slow
def test_twenty_kills(files, unbroken):
    arguments = words(files, "killed", "--load", files / "killed", "--save-interval", 1)
    command = [sys.executable, str(ROOT / "pretrain_kd.py"), *arguments]
    for step in [*range(2, KILLS + 2), None]:
        fault = environment(f"kill@{POINTS[step % len(POINTS)]}::{step}" if step else "")
        variables = {**os.environ, **fault, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert result.returncode == (-9 if step else 0), result.stdout[-2000:] + result.stderr[-2000:]
    assert lines(files, "killed") == unbroken


def test_a_change_of_data_parallelism_at_every_stop(files, unbroken, ranks):
    """One process and two in turn: the same prompts, in the same steps."""
    for stop in (3, 4, 9, STEPS):
        size = 1 + stop % 2
        more = ("--load", files / "changing", "--train-iters", stop, "--lr-decay-iters", STEPS)
        ranks.run(train_and_hash, size, words(files, "changing", *more))
    found = lines(files, "changing")
    assert len(found) == STEPS
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert (ours[1], ours[-1]) == (theirs[1], theirs[-1])
