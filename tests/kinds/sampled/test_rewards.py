"""Reward functions in a process of their own, and the advantages of groups."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mkd.kinds.sampled.reward.reward_calls import RewardCalls
from mkd.kinds.sampled.reward.rewards import group_advantages
from mkd.platform.processes import is_alive
from tests.reported import refused

MODULE = "tests.kinds.sampled.reward_functions"


@pytest.fixture
def calls():
    """Return calls(function, timeout_s=...) -> RewardCalls; their processes end with the test."""
    made = []

    def make(function, timeout_s=20.0):
        made.append(RewardCalls(f"{MODULE}:{function}", timeout_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_function_gets_prompt_completion_and_fields(calls, capfd):
    assert calls("of_length")("two fox, fox", "abcdefg", {"answer": 5}) == 2 + 0.5 + 1.0
    assert calls("quickly")("p", "a b ", {}) == 0.5
    assert "a function may print" in capfd.readouterr().err


def test_a_function_may_say_why(calls):
    pair = calls("pair_of")
    assert pair.judge("p", "c", {"pair": [0.5, "too short"]}) == (0.5, "too short")
    assert (
        pair.judge("p", "c", {"pair": [1, None]}) == (1.0, "") and pair("p", "c", {"pair": [1, "x"]}) == 1.0
    )
    for wrong in ([1], [1, 2], ["x", "1"], [1, "x", "y"]):
        with refused("reward-failed"):
            pair("p", "c", {"pair": wrong})


def test_its_process_is_another_one_without_our_libraries(calls):
    assert calls("libraries")("p", "c", {}) == 0
    process = calls("process")
    assert process("p", "c", {}) == process("p", "c", {}) != os.getpid()


@pytest.mark.parametrize(
    "completion, code",
    [
        ("raise", "reward-failed: --reward raised"),
        ("exit", "reward-failed: --reward raised"),
        ("die", "reward-failed: the process of --reward ended"),
        ("none", "reward-failed: --reward raised"),
        ("text", "reward-failed: --reward raised"),
        ("nan", "reward-failed: and a reward is a number from"),
        ("infinite", "reward-failed: and a reward is a number from"),
        ("huge", "reward-failed: and a reward is a number from"),
    ],
)
def test_a_failure_is_an_error_and_the_next_call_works(calls, completion, code):
    function = calls("misbehave")
    with refused(code):
        function("p", completion, {})
    assert function("p", "fine", {}) == 1


def test_a_call_that_hangs_is_ended(calls):
    function = calls("misbehave", timeout_s=1.5)
    start = time.monotonic()
    with refused("reward-timed-out"):
        function("p", "hang", {})
    assert 1 < time.monotonic() - start < 10
    assert function("p", "fine", {}) == 1


def test_a_program_that_it_starts_does_not_read_the_calls(calls):
    function = calls("starts_a_program", timeout_s=10.0)
    assert function("p", "c", {}) == function("p", "c", {}) == 0


def test_programs_that_it_started_end_with_it(calls, tmp_path):
    with refused("reward-timed-out"):
        calls("leaves_a_program", timeout_s=1.5)("p", str(tmp_path / "started"), {})
    started = int((tmp_path / "started").read_text())
    deadline = time.monotonic() + 5
    while is_alive(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(started)


def judge_slowly(folder: Path):
    """Return the rewards of 6 completions of 0.2 s, metrics, and how often this rank announced it."""
    from mkd.data.prompts import Prompt, PromptSet
    from mkd.kinds.sampled.reward.rewards import Rewards
    from mkd.kinds.sampled.sampler.rollouts import LENGTH, Request, Rollout
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context, ids = ParallelContext.create(detect()), np.array([97])
    prompts = PromptSet([Prompt(ids, "p", 1, {})], 0, "")
    announced: list[float] = []
    rewards = Rewards(
        RewardCalls(f"{MODULE}:slowly", 20.0),
        prompts,
        SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))),
        context,
        group_size=2,
        max_failed=0,
        file=folder / "failed",
        announce=lambda iteration: announced.append(time.monotonic()),
        slice_s=0.3,
    )
    rewards.start()
    made = [
        Rollout(Request(0, n, ids), np.full(n + 1, 98), np.zeros(n + 1), np.zeros(n + 1), LENGTH)
        for n in range(6)
    ]
    judged, figures = rewards(made, 1)
    rewards.calls.close()
    return [one.advantage for one in judged], figures, len(announced)


def test_all_ranks_meet_while_rank_0_judges(ranks, tmp_path):
    """A slice is two completions of 0.2 s, so the watchdogs of both ranks see progress."""
    first, second = ranks.run(judge_slowly, 2, tmp_path)
    assert first == second
    advantages, figures, announced = first
    assert figures["reward/mean"] == 3.5 and announced >= 3
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5] * 3, abs=1e-5)


@pytest.mark.parametrize("name", ["no_such_module:f", f"{MODULE}:missing", f"{MODULE}:NOT_A_FUNCTION"])
def test_a_name_that_is_no_function_is_refused(name):
    with refused("reward-not-found") as caught:
        RewardCalls(name, 5.0).start()
    assert name in caught.value.what


@pytest.mark.parametrize("signature", ["(prompt, completion)", "(*, prompt, completion, fields)", "()"])
def test_a_function_of_other_arguments_is_refused_before_the_first_step(signature, tmp_path, monkeypatch):
    (tmp_path / "short_reward.py").write_text(
        f"def judge{signature}:\n    return 1.0\n\n"
        "async def later(prompt, completion, fields):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    with refused("reward-not-found: called with prompt, completion and the other fields"):
        RewardCalls("short_reward:judge", 30.0).start()
    with refused("reward-not-found: is async"):
        RewardCalls("short_reward:later", 30.0).start()


def test_advantages_are_relative_to_the_group():
    random, nan = np.random.default_rng(0), float("nan")
    rewards = random.normal(size=(6, 4))
    rewards[1] = 0.1  # all equal: its mean is not exactly 0.1
    rewards[2, 1], rewards[3, :3], rewards[4] = nan, nan, nan
    found, is_flat = group_advantages(rewards)
    assert is_flat.tolist() == [False, True, False, True, True, False]
    for mine, group in zip(found, rewards, strict=True):
        here = [one for one in group.tolist() if one == one]
        spread = statistics.stdev(here) if len(here) > 1 else 0.0
        expected = [0.0 if one != one else (one - np.mean(here)) / (spread + 1e-6) for one in group]
        assert mine == pytest.approx(expected, abs=1e-9)
    assert (found[[1, 3, 4]] == 0).all()
