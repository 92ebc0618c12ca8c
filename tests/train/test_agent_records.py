"""Records of an agent in another process: loss and gradients, layouts, waiting, resuming, and bad records."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
import torch

from tests.reported import reported_codes
from tests.tiny_models import make_model
from tests.train.command import read_metrics, run_main, write_records
from tests.train.invariance import worst_relative_error
from tests.train.record_run import GROUPS, MEMBERS, argv, make_files, one_step, playing
from tests.train.reward_run import dense_loss
from tests.train.rollout_run import EOS, Case, reference
from tests.train.test_resume import train_and_hash
from tests.xtoken.small_tokenizers import train_byte_level

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CASES = (
    pytest.param(Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)), id="DP2"),
    pytest.param(Case("PP2", 2, PP2), id="PP2"),
    pytest.param(Case("CP2", 2, ("--context-parallel-size", 2)), id="CP2"),
    pytest.param(Case("TP2 + sequence parallel", 2, (*TP2, "--sequence-parallel")), id="TP2", marks=SLOW),
    pytest.param(Case("PP2 DP2", 4, PP2), id="PP2 DP2", marks=SLOW),
)
STEPS = "loss", "reward/mean", "rollout/length", "rollout/version_lag", "consumed_prompts"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def single(files, ranks):
    with playing(files, "single"):
        (found,) = ranks.run(one_step, 1, argv(files, "single"), files / "single gradients")
    return found


def test_grpo_on_several_turns_equals_transformers(single, files):
    """A quarter of the loss is the divergence; ratios are those to ln p in the records."""
    assert len(single["rollouts"]) == GROUPS * MEMBERS == len(single["documents"])
    assert single["figures"]["rollout/logp_gap"] < 1e-4
    assert single["figures"]["rollout/version_lag"] == single["figures"]["rollout/stale"] == 0
    groups: dict[str, list] = {}
    for one in single["rollouts"].values():
        groups.setdefault(one.group, []).append(one)
        assert 0 < one.num_sampled < len(one.ids), "results of the tool stand between the turns"
    for group in groups.values():
        rewards = [one.reward for one in group]
        spread = statistics.stdev(rewards) + 1e-6
        for one in group:
            expected = (one.reward - statistics.mean(rewards)) / spread
            assert one.advantage == pytest.approx(expected, abs=1e-6)
    advantages = {(*one.request.ids, *one.ids): one for one in single["rollouts"].values()}
    for tokens, _, mask, advantage, logp in single["documents"]:
        one = advantages[tuple(tokens.tolist())]
        first = len(one.request.ids) - 1
        assert mask[first:-1].numpy().astype(bool).tolist() == one.loss.tolist() and not mask[:first].any()
        assert (advantage[first:-1].numpy() == np.float32(one.advantage)).all()
        assert (logp[first:-1].numpy() == one.logp).all()
    dense = dense_loss(files, single["documents"], files / "dense", ratio=0.25, has_ratio=True)
    assert single["sums"]["loss"] / single["sums"]["num_loss_tokens"] == pytest.approx(
        dense["loss"], rel=1e-5
    )
    error, where = worst_relative_error(files / "single gradients", files / "dense")
    assert error <= 1e-5, where
    assert {file for one in single["sources"] for file in one} == {
        str(files / "single in" / f"group_{number:05d}.jsonl") for number in range(GROUPS)
    }


def test_exact_kd_on_several_turns_equals_transformers(files, ranks):
    with playing(files, "kd"):
        (found,) = ranks.run(one_step, 1, argv(files, "kd", ratio=1), files / "kd gradients")
    documents = [document[:3] for document in found["documents"]]
    settings = dict(divergence="reverse_kl")
    loss = reference(files / "student", [files / "teacher"], documents, files / "kd dense", **settings)
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "kd gradients", files / "kd dense")
    assert error <= 1e-5, where


@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_process(case, single, files, ranks):
    name = f"layout {case.name}"
    with playing(files, name):
        results = ranks.run(one_step, case.ranks, argv(files, name, *case.flags), files / f"{name} gradients")
    assert all(found["rollouts"].keys() == single["rollouts"].keys() for found in results)
    for key, value in single["sums"].items():
        assert results[0]["sums"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for key in ("rollout/length", "rollout/teacher_nll", "reward/mean"):
        assert results[-1]["figures"][key] == pytest.approx(single["figures"][key], rel=1e-5)
    error, where = worst_relative_error(files / f"{name} gradients", files / "single gradients")
    assert error <= 1e-5, where


def steps(files, run: str) -> list[list[float]]:
    return [[line[name] for name in STEPS] for line in read_metrics(files / run) if "split" not in line]


def test_a_resumed_run_is_bitwise_the_unbroken_one(files, ranks):
    """It stops after two steps; then it loses its last checkpoint, and takes the same records again."""
    words = argv(
        files, "resumed", "--save", files / "resumed", "--load", files / "resumed", "--save-interval", 1
    )
    with playing(files, "resumed"):
        (first,) = ranks.run(train_and_hash, 1, [*words, "--exit-interval", "2"])
        (whole,) = ranks.run(train_and_hash, 1, words)
    expected = steps(files, "resumed")
    assert len(expected) == 4 and first != whole and expected[-1][-1] == 4 * GROUPS
    (again,) = ranks.run(train_and_hash, 1, [*words, "--ckpt-step", "1"])
    assert again == whole and steps(files, "resumed") == expected
    progress = json.loads((files / "resumed in" / "progress.json").read_text())
    assert progress["updates"] == 3 and progress["state"] == "training"
    taken = [
        json.loads(line)["record"]["id"]
        for path in sorted((files / "resumed" / "rollouts").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()[1:]
    ]
    assert len(set(taken)) == len(taken) == 4 * GROUPS * MEMBERS


def test_a_run_without_records_saves_and_ends(files, ranks):
    (files / "waiting in").mkdir()
    words = argv(files, "waiting", "--save", files / "waiting", "--rollout-records-timeout-s", 1)
    (result,) = run_main(ranks, words)
    assert result.exit_code == 75, result.stderr
    assert "no record has come to" in result.stderr and "0 of 3 groups complete" in result.stderr


def test_ln_p_of_other_weights_is_an_error(files, ranks):
    with playing(files, "other"):
        (found,) = ranks.run(one_step, 1, argv(files, "other", ratio=1), files / "other gradients")
    folder = files / "wrong in"
    folder.mkdir()
    lines = [line for path in (files / "other in").glob("*.jsonl") for line in path.read_text().splitlines()]
    words = argv(files, "wrong", "--save", files / "wrong", ratio=1)
    rollouts = files / "wrong" / "rollouts"
    rollouts.mkdir(parents=True)
    (rollouts / "run.json").write_text('{"run": "named"}')
    changed = []
    for record in map(json.loads, lines):
        record["logp"] = [None if one is None else one - 1 for one in record["logp"]]
        changed.append(json.dumps(record | {"version": "named-0"}))
    (folder / "a.jsonl").write_text("\n".join(changed) + "\n")
    (result,) = run_main(ranks, [*words, "--load", str(files / "wrong")])
    assert result.exit_code == 1 and reported_codes(result.stderr) == [
        "rollout-server-weights: ln p of the records differ"
    ], result.stderr
    assert found["figures"]["rollout/logp_gap"] < 1e-4 and isinstance(found["sums"]["kd"], float)
    assert torch.is_tensor(found["documents"][0][0])


@SLOW
def test_a_cross_tokenizer_teacher_reads_records_as_stored_tokens(files, ranks):
    """A step on records has the divergence of a step on the same tokens with the same loss, stored."""
    sizes = dict(hidden_size=56, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    make_model(files / "cross", "qwen2", seed=7, vocab_size=620, **sizes | EOS)
    train_byte_level(600).save_pretrained(files / "cross")
    teacher = (
        "--teacher-hf",
        files / "cross",
        "--xtoken-loss",
        "partition_kl",
        "--kd-divergence",
        "reverse_kl",
    )
    with playing(files, "cross run"):
        (found,) = ranks.run(
            one_step, 1, argv(files, "cross run", *teacher, ratio=1), files / "cross gradients"
        )
    records = []
    for one in found["rollouts"].values():
        loss = [0] * len(one.request.ids) + one.loss.astype(int).tolist()
        records.append({"tokens": {"ids": [*one.request.ids.tolist(), *one.ids.tolist()], "loss": loss}})
    write_records(files / "tokens.jsonl", *records)
    assert 0.5 < found["figures"]["rollout/coverage"] <= 1
    words = [
        "--student-hf",
        files / "student",
        *teacher,
        "--kd-ratio",
        1,
        "--data-path",
        files / "tokens.jsonl",
    ]
    words += ["--seq-length", 64, "--micro-batch-size", 1, "--train-iters", 1, "--lr", 1e-3]
    words += ["--global-batch-size", found["packs"], "--log-dir", files / "stored", "--log-interval", 1]
    words += ["--data-cache-path", files / "cache"]
    (result,) = run_main(ranks, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    (line, *_) = (line for line in read_metrics(files / "stored") if "split" not in line)
    expected = found["sums"]["kd"] / found["sums"]["num_loss_tokens"]
    assert line["kd_loss"] == pytest.approx(expected, rel=1e-5)
    with playing(files, "cross parts"):
        words = argv(files, "cross parts", *teacher, "--context-parallel-size", 2, ratio=1)
        results = ranks.run(one_step, 2, words, files / "cross parts gradients")
    assert results[0]["sums"] == pytest.approx(found["sums"], rel=1e-5, abs=1e-6)
    quarters = (f"rollout/kl_quarter_{i}" for i in range(1, 5))
    for name in ("rollout/coverage", "rollout/teacher_nll", *quarters):
        assert results[1]["figures"][name] == pytest.approx(found["figures"][name], abs=1e-5), name
    error, where = worst_relative_error(files / "cross parts gradients", files / "cross gradients")
    assert error <= 1e-5, where


@SLOW
def test_stored_packs_beside_records(files, ranks):
    more = ("--on-policy-fraction", 0.5, "--data-path", files / "text.jsonl", "--train-iters", 2)
    with playing(files, "mixed"):
        (result,) = run_main(ranks, argv(files, "mixed", *more, ratio=1))
    assert result.exit_code == 0, result.stderr
    lines = [line for line in read_metrics(files / "mixed") if "split" not in line]
    assert [(line["consumed_prompts"], line["consumed_samples"]) for line in lines] == [(3, 2), (6, 4)]


@SLOW
def test_adapters_on_records(files, ranks):
    """The weights for the agent have the adapters added: its ln p agree after updates too."""
    more = ("--lora-rank", 2, "--train-iters", 3, "--lr", 1e-2, "--max-staleness", 0)
    with playing(files, "lora", ahead=1):
        (result,) = run_main(ranks, argv(files, "lora", *more, ratio=1))
    assert result.exit_code == 0, result.stderr
    lines = [line for line in read_metrics(files / "lora") if "split" not in line]
    assert len(lines) == 3 and all(line["rollout/logp_gap"] < 1e-4 for line in lines)


@SLOW
def test_the_tag_of_a_record_chooses_its_teacher(files, ranks):
    """The games have one tag, so the step is that of its teacher alone."""
    teachers = [
        {"name": "player", "hf": str(files / "teacher"), "tags": ["game"]},
        {"name": "writer", "hf": str(files / "second"), "tags": ["essay"]},
    ]
    settings = {"teachers": teachers, "kd": {"teacher_combination": "route"}}
    (files / "route.yaml").write_text(json.dumps(settings))
    losses = {}
    for run, more in (("routed", ("--config", files / "route.yaml")), ("alone", ())):
        words = argv(files, run, *more, "--train-iters", 1, ratio=1)
        if more:
            place = words.index("--teacher-hf")
            del words[place : place + 2]
        with playing(files, run):
            (result,) = run_main(ranks, words)
        assert result.exit_code == 0, result.stderr
        (line, *_) = (line for line in read_metrics(files / run) if "split" not in line)
        losses[run] = line["kd_loss"], line["rollout/teacher_nll"]
    assert losses["routed"] == pytest.approx(losses["alone"], rel=1e-6)
