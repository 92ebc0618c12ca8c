"""Check GRPO: loss and gradients against transformers, at every layout; resumed runs; rewards that fail."""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace

import pytest
import torch

from mkd.config.schema import RewardConfig
from mkd.operations.phases import Phases
from mkd.run import loop
from mkd.train.step import StepResult
from mkd.train.sums import LossSums
from tests.kinds.sampled.reward_functions import of_length
from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, run_main
from tests.train.invariance import worst_relative_error
from tests.train.reward_run import REWARD, UPDATES, argv, dense_loss, one_step
from tests.train.rollout_run import EOS, Case, make_files
from tests.train.test_resume import train_and_hash

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CP2 = ("--context-parallel-size", 2)
FEWER_IDS = 300  # the student knows 307
SEVERAL = ("--rollout-updates", UPDATES)
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, "--sequence-parallel")),
    Case("PP2 VPP2", 2, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
    Case("micro-batch 2", 1, ("--micro-batch-size", 2)),
)
SLOW_CASES = (
    Case("TP2", 2, TP2),
    Case("PP2", 2, PP2),
    Case("DP2", 2),
    Case("TP2 PP2 micro-batch 2", 4, (*TP2, *PP2, "--micro-batch-size", 2)),
    Case("CP2", 2, CP2),
    Case("TP2 CP2", 4, (*TP2, *CP2)),
)


CASES_OF_RESUMES = (
    Case("one process"),
    pytest.param(Case("PP2 DP2", 4, PP2), marks=SLOW),
    pytest.param(Case("CP2", 2, CP2), marks=SLOW),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("rewards"))


@pytest.fixture(scope="module")
def single(files, ranks):
    """Return one process's step with ratios that are not 1."""
    (found,) = ranks.run(one_step, 1, argv(files, "single", *SEVERAL), files / "single", True)
    return found


def loss_of(found: dict) -> float:
    return found["sums"]["loss"] / found["sums"]["num_loss_tokens"]


def test_advantages_come_from_the_rewards_of_each_group(single, files):
    """The reward function got what was sampled, and the other fields of the prompts."""
    from mkd.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(files / "student"))
    groups: dict[int, list[tuple[float, float]]] = {}
    for one in single["rollouts"]:
        ids = one.ids[:-1] if one.ids[-1] == 0 else one.ids
        prompt = tokenizer.decode(one.request.ids.tolist())
        reward = of_length(prompt, tokenizer.decode(ids.tolist()), {"answer": one.request.prompt})
        groups.setdefault(one.request.prompt, []).append((reward, one.advantage))
    assert len(groups) == 4
    for group in groups.values():
        rewards = [reward for reward, _ in group]
        spread = statistics.stdev(rewards) + 1e-6
        for reward, advantage in group:
            assert advantage == pytest.approx((reward - statistics.mean(rewards)) / spread, abs=1e-6)
    advantages = {(*one.request.ids, *one.ids): one.advantage for one in single["rollouts"]}
    assert len(single["documents"]) == len(advantages) == 12
    for tokens, _, mask, advantage, _ in single["documents"]:
        assert (advantage == mask * torch.tensor(advantages[tuple(tokens.tolist())])).all()
    rewards = [reward for group in groups.values() for reward, _ in group]
    flat = statistics.mean(len({reward for reward, _ in group}) == 1 for group in groups.values())
    expected = {"reward/mean": statistics.mean(rewards), "reward/std0_groups": flat, "reward/failed": 0}
    assert single["figures"] == pytest.approx(expected)


def test_clipped_loss_and_gradients_equal_transformers(single, files):
    """Ratios are clipped on both sides; a quarter of the loss is the divergence from a teacher."""
    found = dense_loss(files, single["documents"], files / "dense", ratio=0.25, has_ratio=True)
    assert found["above"] > 3 and found["below"] > 3, "the test needs ratios beyond both sides"
    assert loss_of(single) == pytest.approx(found["loss"], rel=1e-5)
    parts = 0.75 * single["sums"]["feedback_loss"] + 0.25 * single["sums"]["kd"]
    assert single["sums"]["loss"] == pytest.approx(parts, rel=1e-12)
    clipped = single["sums"]["reward/clipped"] / single["sums"]["num_loss_tokens"]
    assert clipped == pytest.approx(found["clipped"], rel=1e-12)
    error, where = worst_relative_error(files / "single" / "gradients", files / "dense")
    assert error <= 1e-5, where


def test_one_update_has_the_ratio_1_and_needs_no_reference(files, ranks):
    (found,) = ranks.run(one_step, 1, argv(files, "plain", ratio=0), files / "plain")
    dense = dense_loss(files, found["documents"], files / "dense plain", ratio=0, has_ratio=False)
    assert loss_of(found) == pytest.approx(dense["loss"], abs=1e-6)
    assert found["sums"]["reward/clipped"] == 0
    error, where = worst_relative_error(files / "plain" / "gradients", files / "dense plain")
    assert error <= 1e-5, where
    (several,) = ranks.run(one_step, 1, argv(files, "several", *SEVERAL, ratio=0), files / "several")
    assert loss_of(several) == pytest.approx(loss_of(found), abs=1e-5), "before the first update"


def test_ratios_are_1_at_first_beside_a_teacher_that_knows_fewer_ids(files, ranks):
    """Ids that the teacher lacks are never sampled, so they are no part of the policy."""
    sizes = dict(hidden_size=48, num_hidden_layers=4, intermediate_size=128, vocab_size=FEWER_IDS)
    add_tokenizer(make_model(files / "fewer", "llama", seed=2, **sizes | EOS))
    arguments = argv(files, "fewer ids", *SEVERAL, "--teacher-hf", files / "fewer")
    (found,) = ranks.run(one_step, 1, arguments, files / "fewer ids")
    expected = sum(-float((mask * advantage).sum()) for _, _, mask, advantage, _ in found["documents"])
    assert found["sums"]["feedback_loss"] == pytest.approx(expected, abs=1e-3)
    assert found["sums"]["reward/clipped"] == 0


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=one.name) for one in CASES),
        *(pytest.param(one, id=one.name, marks=SLOW) for one in SLOW_CASES),
    ],
)
def test_every_layout_equals_one_process(case, single, files, ranks):
    arguments = argv(files, "layout", *SEVERAL, *case.flags)
    results = ranks.run(one_step, case.ranks, arguments, files / "layout", True)
    assert all(found["sums"] == results[0]["sums"] for found in results)
    assert results[0]["sums"] == pytest.approx(single["sums"], rel=1e-5, abs=1e-6)
    assert results[-1]["figures"] == single["figures"]
    error, where = worst_relative_error(*(files / name / "gradients" for name in ("layout", "single")))
    assert error <= 1e-5, where


@pytest.mark.parametrize("case", CASES_OF_RESUMES)
def test_several_updates_resume_bitwise(case, files, ranks):
    """The initial student is the reference, and ratios move with the updates."""
    straight, halves = files / f"straight {case.name}", files / f"halves {case.name}"

    def train(folder, *more):
        flags = (*SEVERAL, *case.flags, "--lr", 1e-2, "--save", folder, *more)
        arguments = argv(files, folder.name, *flags, "--teacher-hf", files / "student")
        return ranks.run(train_and_hash, case.ranks, arguments)

    whole = train(straight)
    train(halves, "--exit-interval", 2)
    assert train(halves, "--load", halves) == whole
    steps, again = read_metrics(straight), read_metrics(halves)
    names = ("loss", "kd_loss", "reward/mean", "reward/clipped", "learning_rate", "rollout/logp_gap")
    assert [[line[name] for name in names] for line in again] == [
        [one[name] for name in names] for one in steps
    ]
    assert len(steps) == 4 and all(line["reward/clipped"] > 0 and line["kd_loss"] > 0 for line in steps)
    assert all(line["ce_loss"] is None and line["rollout/logp_gap"] < 1e-5 for line in steps)


@pytest.mark.parametrize(
    "reward, more, code",
    [
        ("raises_sometimes", (), "reward-failed: --reward raised"),
        ("hangs_once", ("--reward-timeout-s", 1), "reward-timed-out"),
        ("never_a_number", ("--max-failed-rewards", 3), "reward-failed: and a reward is a number from"),
    ],
)
def test_too_many_failures_end_the_run_on_all_ranks(reward, more, code, files, ranks):
    results = run_main(ranks, argv(files, f"ended {reward}", *more, reward=reward), 2)
    assert [result.exit_code for result in results] == [65, 65]
    assert reported_codes(results[0].stderr) == [code] and "prompts.jsonl:" in results[0].stderr


def test_failures_within_the_limit_are_left_out_and_listed(files, ranks):
    limit = ("--max-failed-rewards", 12, "--train-iters", 2)
    for reward, more in (("raises_sometimes", ()), ("hangs_once", ("--reward-timeout-s", 1))):
        folder = files / f"limit {reward}"
        (result,) = run_main(ranks, argv(files, folder.name, *limit, *more, reward=reward))
        assert result.exit_code == 0, result.stderr
        failed = [json.loads(line) for line in (folder / "failed_rewards.jsonl").read_text().splitlines()]
        lines = read_metrics(folder)
        assert sum(line["reward/failed"] for line in lines) == len(failed) > 0
        assert {one["iteration"] for one in failed} <= {1, 2}
        assert all(one["file"] == str(files / "prompts.jsonl") and one["reason"] for one in failed)


def test_a_step_without_any_reward_says_so(files, ranks):
    limit = ("--max-failed-rewards", 12, "--train-iters", 1)
    (result,) = run_main(ranks, argv(files, "no reward", *limit, reward="always_raises"))
    (line,) = read_metrics(files / "no reward")
    assert result.exit_code == 0 and line["reward/failed"] == 12 and line["grad_norm"] == 0
    assert line.get("reward/mean") is line.get("reward/std0_groups") is None
    assert "iteration 1: no completion is left for the loss: 12 of 12 have no reward" in result.stdout


def test_a_step_with_a_skipped_update_counts_as_skipped(monkeypatch):
    sums = LossSums(0.0, 1.0, 1, {})
    results = iter([StepResult(sums, 1.0, 1e-3, 500.0, is_applied) for is_applied in (False, True)])
    monkeypatch.setattr(loop, "train_step", lambda *given, **more: next(results))
    guards = SimpleNamespace(
        stopper=SimpleNamespace(exchange=None), non_finite=SimpleNamespace(judge=lambda *given: None)
    )
    settings = SimpleNamespace(grpo=RewardConfig(reward="r:f", rollout_updates=2))
    engine = SimpleNamespace(schedule=SimpleNamespace(remote=()))
    run = SimpleNamespace(phase=Phases(), config=settings, meter=None, engine=engine, guards=guards)
    found = loop.updates(run, 1, [], [], ())
    assert not found.is_applied and found.step_time_ms == 1000


def test_the_command_says_what_it_does(files, ranks):
    arguments = argv(files, "command", "--train-iters", 1, ratio=0.1)
    place = arguments.index("--teacher-hf")
    del arguments[place : place + 2]
    (result,) = run_main(ranks, arguments)
    assert result.exit_code == 0, result.stderr
    assert "  reward " in result.stdout
    card = (files / "command" / "loss_card.txt").read_text()
    assert "0.9 policy + 0.1 KD" in card and f"{REWARD}:of_length" in card and "KL(p_s || p_t)" in card
    (result,) = run_main(ranks, [*arguments, "--reward", "no_such_module:f"])
    assert result.exit_code == 64 and reported_codes(result.stderr) == ["reward-not-found"]
