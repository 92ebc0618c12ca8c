"""Check contexts on the student's own text: loss and gradients against transformers at every layout."""

from __future__ import annotations

import json

import pytest

from tests.train import record_run
from tests.train.command import read_metrics, run_main, write_records
from tests.train.context_rollout_run import (
    Taught,
    argv,
    knowing,
    make_rollout_files,
    reference,
    taught_of,
    write_teachers,
)
from tests.train.invariance import worst_relative_error
from tests.train.rollout_run import Case, one_step, require_equal_steps

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, "--sequence-parallel")),
    Case("PP2 micro-batch 2", 2, (*PP2, "--micro-batch-size", 2)),
    Case("PP2 VPP2", 2, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
)
KNOWS = {"name": "knows", "context": {"missing": "skip"}}
KINDS = {"frozen": "teacher", "live": None}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_rollout_files(tmp_path_factory.mktemp("context_rollouts"))


@pytest.fixture(scope="module")
def configs(files):
    models = {"frozen": {"hf": str(files / "teacher")}, "live": {"weights": "live"}}
    return {kind: write_teachers(files / f"{kind}.yaml", knowing(one)) for kind, one in models.items()}


@pytest.fixture(scope="module")
def singles(files, configs, ranks):
    """Return the step of one process for each kind of weights."""
    found = {}
    for kind, config in configs.items():
        (found[kind],) = ranks.run(one_step, 1, argv(files, f"single {kind}", config), files / f"one {kind}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient_equal_transformers(kind, singles, files):
    single, name = singles[kind], KINDS[kind]
    completions = taught_of(single["rollouts"], files)
    assert {len(one.ids) for one in completions} - {14} and any(one.theirs is None for one in completions)
    loss = reference(files / "student", name and files / name, completions, files / f"dense {kind}")
    assert single["sums"]["kd"] / single["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / f"one {kind}", files / f"dense {kind}")
    assert error <= 1e-5, where


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout_equals_one_process(case, kind, configs, singles, files, ranks):
    results = ranks.run(
        one_step, case.ranks, argv(files, "layout", configs[kind], *case.flags), files / "layout gradients"
    )
    require_equal_steps(results, singles[kind], files, gradients=f"one {kind}")


def test_a_run_with_a_context_resumes_bitwise(configs, files, ranks):
    """Two runs of two steps equal one of four; the start says how both prompts end."""

    def run(folder, *more):
        flags = (*TP2, "--save", files / folder, "--log-interval", 1, *more)
        results = run_main(ranks, argv(files, folder, configs["live"], *flags), 2)
        assert results[0].exit_code == 0, results[0].stderr
        names = ("loss", "num_aligned/knows", "rollout/coverage", "rollout/teacher_nll", "grad_norm")
        return results[0].stdout, [[line[name] for name in names] for line in read_metrics(files / folder)]

    text, straight = run("straight")
    assert "  knows reads prompts of its own: packs of 128 tokens; " in text
    assert "1 prompt without a context" in text and "prompts end with" in text
    run("halves", "--exit-interval", 2)
    assert run("halves", "--load", files / "halves")[1] == straight
    assert len(straight) == 4 and all(0.5 < coverage < 1 for _, _, coverage, *_ in straight)


def test_records_of_agents_bring_the_prompts_of_the_teacher(files, ranks):
    """One of three records of a group has none; results of tools have no loss on either side."""
    config = write_teachers(files / "agent.yaml", {"hf": str(files / "teacher")} | KNOWS)
    plain = record_run.argv(files, "played", ratio=1)
    with record_run.playing(files, "played"):
        (played,) = ranks.run(record_run.one_step, 1, plain, files / "played gradients")
    prepared = files / "agent" / "rollouts"
    prepared.mkdir(parents=True)
    (prepared / "run.json").write_text('{"run": "named"}')
    records, theirs = [], {}
    for path in sorted((files / "played in").glob("*.jsonl")):
        records += [json.loads(line) | {"version": "named-0"} for line in path.read_text().splitlines()]
    for number, one in enumerate(records):
        if number % 3:
            theirs[one["id"]] = one["teacher_ids"] = [9, 8, 7 + number]
    write_records(files / "agent in.jsonl", *records)
    (files / "agent in").mkdir()
    (files / "agent in.jsonl").rename(files / "agent in" / "a.jsonl")
    words = [*record_run.argv(files, "agent", ratio=1), "--config", str(config)]
    place = words.index("--teacher-hf")
    del words[place : place + 2]
    save = ("--save", str(files / "agent"), "--load", str(files / "agent"))
    (found,) = ranks.run(record_run.one_step, 1, [*words, *save], files / "agent gradients")
    assert found["rollouts"].keys() == played["rollouts"].keys()
    completions = [
        Taught(one.request.ids, theirs.get(one.id), one.ids, one.loss) for one in found["rollouts"].values()
    ]
    plain_kl = dict(temperature=1.0, divergence="reverse_kl")
    loss = reference(
        files / "student", files / "teacher", completions, files / "agent dense", settings=plain_kl
    )
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "agent gradients", files / "agent dense")
    assert error <= 1e-5, where
