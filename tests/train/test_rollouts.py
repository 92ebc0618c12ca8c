"""Check steps with rollouts: loss and gradients against transformers, at every layout, and resumed runs."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from mkd.tokenizers.load import open_tokenizer
from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, read_weights, run_main, with_fault, write_records
from tests.train.invariance import worst_relative_error
from tests.train.rollout_run import (
    EOS,
    NEW_TOKENS,
    VOCAB_SIZES,
    Case,
    argv,
    expected_figures,
    make_files,
    one_step,
    reference,
    require_equal_steps,
    samples_of_steps,
)
from tests.train.test_resume import train_and_hash

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)
CP2 = ("--context-parallel-size", 2)
SP, DISTRIBUTED = ("--sequence-parallel",), ("--use-distributed-optimizer",)
OVERLAP = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, *SP)),
    Case("PP2 VPP2", 2, VPP2),
    Case("DP2 + distributed optimizer", 2, DISTRIBUTED),
    Case("micro-batch 2", 1, ("--micro-batch-size", 2)),
)
SLOW_CASES = (
    Case("TP2", 2, TP2),
    Case("PP2", 2, PP2),
    Case("DP2", 2),
    Case("TP2 PP2 micro-batch 2", 4, (*TP2, *PP2, "--micro-batch-size", 2)),
    Case("PP2 DP2 + overlapped communication", 4, (*PP2, *OVERLAP)),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="module")
def single(files, ranks):
    """Return one process's step, half of it on stored packs."""
    (found,) = ranks.run(one_step, 1, argv(files, "single", fraction=0.5), files / "gradients")
    return found


def test_completions_become_documents_as_sampled(single):
    """The loss is on the sampled tokens alone, the stop token included, each predicted in its place."""
    assert len(single["rollouts"]) == 10
    by_tokens = {tuple(tokens.tolist()): (labels, mask) for tokens, labels, mask in single["documents"]}
    ends = set()
    for prompt, ids, logp in single["rollouts"].values():
        labels, mask = by_tokens[(*prompt.tolist(), *ids.tolist())]
        assert mask.nonzero().flatten().tolist() == list(range(len(prompt) - 1, len(prompt) + len(ids) - 1))
        assert labels[mask > 0].tolist() == ids.tolist() and len(logp) == len(ids)
        assert (ids[:-1] != 0).all() and (ids[-1] == 0 or len(ids) == NEW_TOKENS)
        ends.add(int(ids[-1] == 0))
    assert ends == {0, 1}, "the test needs completions of both kinds"
    assert single["sums"]["num_loss_tokens"] == sum(int(mask.sum()) for *_, mask in single["documents"])


def test_every_sampled_id_is_a_token(single, files):
    """The models have 307 and 300 rows, the tokenizer 289 ids."""
    tokens = set(open_tokenizer(str(files / "student")).vocabulary.values())
    sampled = {token for _, ids, _ in single["rollouts"].values() for token in ids.tolist()}
    assert len(sampled) > 20 and sampled <= tokens


def test_loss_gradients_and_figures_equal_transformers(single, files):
    teachers = [files / "teacher"]
    settings = dict(divergence="reverse_kl")
    loss = reference(files / "student", teachers, single["documents"], files / "reference", **settings)
    sums = single["sums"]
    assert sums["loss"] / sums["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "gradients", files / "reference")
    assert error <= 1e-5, where
    for name, value in expected_figures(files / "student", files / "teacher", single["rollouts"]).items():
        assert single["figures"][name] == pytest.approx(value, abs=1e-5), name
    lengths = [len(ids) for _, ids, _ in single["rollouts"].values()]
    truncated = [len(ids) == NEW_TOKENS and ids[-1] != 0 for _, ids, _ in single["rollouts"].values()]
    assert single["figures"]["rollout/length"] == np.mean(lengths)
    assert single["figures"]["rollout/truncated"] == np.mean(truncated)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=one.name) for one in CASES),
        *(pytest.param(one, id=one.name, marks=SLOW) for one in SLOW_CASES),
    ],
)
def test_every_layout_equals_one_process(case, single, files, ranks):
    arguments = argv(files, "layout", *case.flags, fraction=0.5)
    results = ranks.run(one_step, case.ranks, arguments, files / "layout gradients")
    require_equal_steps(results, single, files)
    assert len({found["num_microbatches"] for found in results}) == 1


@pytest.fixture(scope="module")
def own(files, ranks):
    """Return one process's step on completions alone."""
    (found,) = ranks.run(one_step, 1, argv(files, "own"), files / "own gradients")
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("CP2", 2, CP2), id="CP2"),
        pytest.param(Case("TP2 CP2", 4, (*TP2, *SP, *CP2)), id="TP2 CP2", marks=SLOW),
        pytest.param(Case("CP2 PP2 VPP2", 4, (*CP2, *VPP2)), id="CP2 PP2 VPP2", marks=SLOW),
        pytest.param(Case("CP2 DP2", 4, (*CP2, *OVERLAP)), id="CP2 DP2", marks=SLOW),
        pytest.param(Case("CP4", 4, ("--context-parallel-size", 4)), id="CP4", marks=SLOW),
    ],
)
@pytest.mark.parametrize("temperature", [1, pytest.param(0, marks=SLOW)])
def test_context_parallel_processes_share_the_prompts(temperature, case, own, files, ranks):
    """Each completion is sampled whole on one of them, and trained in parts on all."""
    flags = *case.flags, "--rollout-temperature", temperature
    if not temperature:
        arguments = argv(files, "greedy", "--rollout-temperature", 0)
        (own,) = ranks.run(one_step, 1, arguments, files / "own gradients")
    results = ranks.run(one_step, case.ranks, argv(files, "layout", *flags), files / "layout gradients")
    require_equal_steps(results, own, files, gradients="own gradients")


@SLOW
def test_a_context_parallel_process_without_a_completion_waits_for_the_other(files, ranks):
    more = ("--rollout-prompts", 1, "--samples-per-prompt", 1, *PP2)
    (few,) = ranks.run(one_step, 1, argv(files, "one", *more[:4]), files / "one gradients")
    results = ranks.run(one_step, 4, argv(files, "layout", *more, *CP2), files / "layout gradients")
    assert len(few["rollouts"]) == 1
    require_equal_steps(results, few, files, gradients="one gradients")


def test_samples_name_their_prompts_and_documents(single, files):
    """Stored packs come first; a pack of completions names the lines of its prompts."""
    stored, own = single["sources"]
    assert len(stored) == 2 and all(list(one)[0].startswith(str(files / "cache")) for one in stored)
    assert all(one.keys() == {str(files / "prompts.jsonl")} for one in own)
    lines = sorted(line for one in own for line in one[str(files / "prompts.jsonl")])
    assert lines == sorted(prompt + 1 for prompt, _ in single["rollouts"])


def test_two_teachers_on_the_host_equal_transformers(files, ranks):
    """A jsd, half of the weight each; PP2, micro-batches of 2 packs, truncated completions dropped."""
    config = files / "two.yaml"
    host = {"residency": "host"}
    teachers = [{"hf": str(files / name), **host} for name in ("teacher", "second")]
    config.write_text(json.dumps({"teachers": teachers, "kd": {"kd_jsd_beta": 0.3}}))
    more = ("--config", config, "--kd-divergence", "jsd", "--rollout-truncated", "drop", *PP2)
    arguments = argv(files, "two", *more, "--micro-batch-size", 2)
    place = arguments.index("--teacher-hf")
    del arguments[place : place + 2]
    found = ranks.run(one_step, 2, arguments, files / "two gradients")[0]
    assert 0 < len(found["documents"]) < 10, "truncated completions are dropped, others kept"
    assert all(tokens[-1] == 0 for tokens, *_ in found["documents"])
    folders = [files / name for name in ("teacher", "second")]
    settings = dict(divergence="jsd", jsd_beta=0.3)
    loss = reference(files / "student", folders, found["documents"], files / "two reference", **settings)
    assert found["sums"]["loss"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "two gradients", files / "two reference")
    assert error <= 1e-5, where


EP2 = ("--expert-model-parallel-size", 2)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("EP2", 2, (*EP2, "--use-distributed-optimizer")), id="EP2"),
        pytest.param(Case("PP2 EP2", 4, (*PP2, *EP2)), id="PP2 EP2", marks=SLOW),
        pytest.param(Case("TP2 EP2 + SP", 4, (*TP2, *SP, *EP2)), id="TP2 EP2", marks=SLOW),
    ],
)
def test_experts_over_processes_equal_one_process(case, files, ranks):
    """Replicas with 6 and 5 completions of different lengths, in 3 slots, and with 1 and none."""
    if not (files / "experts").exists():
        sizes = dict(num_hidden_layers=4, vocab_size=VOCAB_SIZES[0])
        add_tokenizer(make_model(files / "experts", "qwen3_moe", seed=3, **sizes | EOS))
    for prompts, samples in ((11, 1), (1, 1)):
        more = ("--student-hf", files / "experts", "--rollout-prompts", prompts)
        more += ("--samples-per-prompt", samples)
        (single,) = ranks.run(one_step, 1, argv(files, "moe", *more), files / "moe gradients")
        arguments = argv(files, "moe layout", *more, *case.flags)
        results = ranks.run(one_step, case.ranks, arguments, files / "moe layout gradients")
        for found in results:
            for key, (_, ids, _) in single["rollouts"].items():
                assert found["rollouts"][key][1].tolist() == ids.tolist()
        for name, value in single["sums"].items():
            assert results[0]["sums"][name] == pytest.approx(value, rel=1e-5), name
        error, where = worst_relative_error(files / "moe layout gradients", files / "moe gradients")
        assert error <= 1e-5, where


FIGURES = ("loss", "rollout/length", "rollout/entropy", "rollout/teacher_nll", "consumed_prompts")


def figures_of(folder) -> list[list[float]]:
    return [[line[name] for name in FIGURES] for line in read_metrics(folder) if "split" not in line]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("one process"), id="one process"),
        pytest.param(Case("PP2 DP2", 4, (*PP2, *OVERLAP)), id="PP2 DP2", marks=SLOW),
        pytest.param(Case("TP2 CP2", 4, (*TP2, *CP2, *OVERLAP)), id="TP2 CP2", marks=SLOW),
    ],
)
def test_resume_is_bitwise(case, files, ranks):
    whole, halves = files / f"whole {case.name}", files / f"halves {case.name}"

    def run(folder, *more):
        flags = ("--log-interval", 1, "--save", folder, *case.flags, *more)
        return ranks.run(train_and_hash, case.ranks, argv(files, folder.name, *flags, fraction=0.5))

    straight = run(whole)
    run(halves, "--exit-interval", 2)
    resumed = run(halves, "--load", halves)
    assert resumed == straight
    assert figures_of(halves) == figures_of(whole)
    _, position = resumed[0]
    assert (position.consumed_prompts, position.consumed_samples) == (20, 8)


@SLOW
def test_a_run_that_fails_while_it_samples_resumes_bitwise(files, ranks):
    exported = [files / name for name in ("unbroken hf", "broken hf")]
    run_main(ranks, argv(files, "unbroken", "--save", files / "unbroken", "--export-hf", exported[0]))
    arguments = argv(files, "broken", "--save", files / "broken", "--save-interval", 1)
    ((exit_code, _, stderr),) = ranks.run(with_fault, 1, arguments, "error@in_rollout::3")
    assert exit_code == 1 and "error@in_rollout::3" in stderr
    more = ["--load", str(files / "broken"), "--export-hf", str(exported[1])]
    (result,) = run_main(ranks, arguments + more)
    assert result.exit_code == 0, result.stderr
    assert figures_of(files / "broken") == figures_of(files / "unbroken")
    unbroken, resumed = map(read_weights, exported)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())


def test_a_resumed_run_at_another_data_parallel_size_draws_the_next_prompts(files, ranks):
    straight, first, second = (files / name for name in ("straight", "first", "second"))
    ranks.run(train_and_hash, 1, argv(files, "straight", "--save", straight))
    ranks.run(train_and_hash, 1, argv(files, "first", "--save", first, "--exit-interval", 2))
    ranks.run(train_and_hash, 2, argv(files, "second", "--save", second, "--load", first))
    found = figures_of(first) + figures_of(second)
    assert len(found) == 4
    for ours, theirs in zip(found, figures_of(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert ours[1] == theirs[1]


def test_each_prompt_comes_once_an_epoch(files, ranks):
    """13 steps of 5 prompts are 5 epochs of 13; two completions each."""
    (drawn,) = ranks.run(samples_of_steps, 1, argv(files, "epochs", "--max-new-tokens", 1), 13)
    assert len(set(drawn)) == len(drawn) == 130
    assert Counter(prompt for _, prompt, _ in drawn) == dict.fromkeys(range(13), 10)
    assert len({prompt for step, prompt, _ in drawn if step < 2}) == 10


def test_the_command_shows_what_it_does(files, ranks):
    """Without --data-path, with held-out text; other prompts do not resume."""
    held_out = ("--valid-data-path", files / "text.jsonl", "--eval-interval", 2)
    arguments = argv(files, "command", "--save", files / "command", *held_out)
    (result,) = run_main(ranks, arguments)
    assert result.exit_code == 0, result.stderr
    lines = read_metrics(files / "command")
    train, valid = ([line for line in lines if ("split" in line) == is_valid] for is_valid in (False, True))
    assert len(train) == 4 and [line["iteration"] for line in valid] == [0, 2, 4]
    assert all(line["rollout/logp_gap"] < 1e-5 and line["ce_loss"] is None for line in train)
    assert train[-1]["consumed_prompts"] == 20 and train[-1]["consumed_samples"] == 0
    assert "  length " in result.stdout and "13 prompts of" in result.stdout
    card = (files / "command" / "loss_card.txt").read_text()
    assert "rollouts" in card and "completions sampled from p_s" in card
    write_records(files / "others.jsonl", {"prompt": "another"})
    again = [*arguments, "--load", str(files / "command"), "--prompt-data-path", str(files / "others.jsonl")]
    (result,) = run_main(ranks, [*again, "--train-iters", "5"])
    assert result.exit_code == 66 and reported_codes(result.stderr) == ["run-differs"]
    assert "rollout.prompts" in result.stderr
