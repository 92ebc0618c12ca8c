"""Runs that are restarted after one fault after another end like a run without faults, bit for bit."""

from __future__ import annotations

import random

import pytest

from tests.train.command import flags, make_files, read_metrics
from tests.train.processes import run_processes
from tests.train.saved_state import saved_state

RANKS = 2
KILLS, KILLED_STEPS = 20, 60
SOAK_STEPS, FAULT_EVERY = 200, 15
SAVE_EVERY = 5
IN_A_STEP = ("in_data", "in_step", "in_optimizer")
IN_A_SAVE = ("before_shard", "mid_shard", "after_shards")
IN_A_SAVE_OF_RANK_0 = ("before_manifest", "before_pointer", "mid_pointer", "after_pointer")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("soak"))


@pytest.fixture(scope="module")
def clean(files):
    """Return a function: number of steps -> last checkpoint of an undisturbed run, each run once."""
    runs = {}

    def get(steps: int) -> dict[str, str]:
        if steps not in runs:
            runs[steps] = survive(files, f"clean {steps}", steps, [])
        return runs[steps]

    return get


def survive(files, run: str, steps: int, faults: list[str]) -> dict[str, str]:
    """Train for `steps` with each of `faults` in turn; return the content of the last checkpoint."""
    save = files / run
    more = (
        "--train-iters",
        steps,
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        SAVE_EVERY,
        "--non-finite",
        "abort",
    )
    argv = flags(files, run, *more)
    for fault in [*faults, ""]:
        ended = run_processes(files, argv, RANKS, fault=fault)
        was_well = [one.code == 0 for one in ended]
        assert was_well == [not fault] * RANKS, f"{fault}: " + "\n".join(one.output[-1500:] for one in ended)
        if fault.startswith(("error", "oom", "eio", "enospc", "nan")):
            assert all(one.code > 0 for one in ended), f"{fault}: nobody had to be killed"
    assert [line["iteration"] for line in read_metrics(save)] == list(range(1, steps + 1))
    return saved_state(save / f"iter_{steps:07d}")


def place(chance: random.Random, step: int) -> str:
    """Choose a point of `step` and a rank that passes it: `point:rank:step`."""
    rank = chance.randrange(RANKS)
    points = IN_A_STEP
    if step % SAVE_EVERY == 0:
        points += IN_A_SAVE if rank else IN_A_SAVE + IN_A_SAVE_OF_RANK_0
    return f"{chance.choice(points)}:{rank}:{step}"


@pytest.mark.fault(2)
def test_kill_9_at_20_random_steps(files, clean):
    chance = random.Random(2)
    steps = sorted(chance.sample(range(1, KILLED_STEPS + 1), KILLS))
    faults = [f"kill@{place(chance, step)}" for step in steps]
    assert survive(files, "killed", KILLED_STEPS, faults) == clean(KILLED_STEPS)


@pytest.mark.fault(36)
@pytest.mark.parametrize("seed", range(5))
def test_soak(seed, files, clean):
    """Faults are of every kind that ends a run at once; test_watchdog.py has those that hang."""
    chance = random.Random(seed)
    faults = []
    for start in range(0, SOAK_STEPS - FAULT_EVERY, FAULT_EVERY):
        point = place(chance, start + chance.randint(1, FAULT_EVERY))
        kinds = (
            ("kill", "error", "exit", "oom", "nan")
            if point.startswith("in_step")
            else ("kill", "error", "exit", "oom")
        )
        kinds += () if point.startswith("in_") else ("eio", "enospc")
        faults.append(f"{chance.choice(kinds)}@{point}")
    assert survive(files, f"soak {seed}", SOAK_STEPS, faults) == clean(SOAK_STEPS)
