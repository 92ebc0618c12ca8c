"""Check contexts on the student's own text: loss and gradients against transformers at every layout."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.kinds.sampled.reward_functions import with_feedback
from tests.train import record_run
from tests.train.command import read_metrics, run_main, write_records
from tests.train.context_rollout_run import (
    Taught,
    Term,
    argv,
    knowing,
    make_rollout_files,
    prompt_of,
    prompts_of,
    reference,
    taught_of,
    write_teachers,
)
from tests.train.invariance import worst_relative_error
from tests.train.reward_run import REWARD
from tests.train.rollout_run import Case, one_step, one_step_alone, require_equal_steps
from tests.train.sides_text import SIDES, Compared

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CP2 = (("--context-parallel-size", 2), ("--context-parallel-size", 2, "--micro-batch-size", 2))
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, "--sequence-parallel")),
    Case("PP2 micro-batch 2", 2, (*PP2, "--micro-batch-size", 2)),
    Case("PP2 VPP2", 2, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
    Case("CP2", 2, CP2[0]),
)
SLOW_CASES = (
    Case("TP2 CP2 + sequence parallel", 4, (*TP2, *CP2[0], "--sequence-parallel")),
    Case("CP2 PP2", 4, (*CP2[0], *PP2)),
    Case("CP2 DP2 + distributed optimizer", 4, (*CP2[0], "--use-distributed-optimizer")),
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
    terms = [Term(name and files / name, completions)]
    loss = reference(files / "student", terms, files / f"dense {kind}")
    assert single["sums"]["kd"] / single["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / f"one {kind}", files / f"dense {kind}")
    assert error <= 1e-5, where


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=one.name) for one in CASES),
        *(pytest.param(one, id=one.name, marks=SLOW) for one in SLOW_CASES),
    ],
)
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


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_agents_bring_the_prompts_of_the_teacher(kind, files, ranks):
    """One of three records of a group has none; results of tools have no loss on either side."""
    model = {"hf": str(files / "teacher")} if kind == "frozen" else {"weights": "live"}
    agent, played_by = f"agent {kind}", f"played {kind}"
    config = write_teachers(files / f"{agent}.yaml", model | KNOWS)
    plain = record_run.argv(files, played_by, ratio=1)
    with record_run.playing(files, played_by):
        (played,) = ranks.run(record_run.one_step, 1, plain, files / "played gradients")
    prepared = files / agent / "rollouts"
    prepared.mkdir(parents=True)
    (prepared / "run.json").write_text('{"run": "named"}')
    records, theirs = [], {}
    for path in sorted((files / f"{played_by} in").glob("*.jsonl")):
        records += [json.loads(line) | {"version": "named-0"} for line in path.read_text().splitlines()]
    for number, one in enumerate(records):
        if number % 3:
            theirs[one["id"]] = one["teacher_ids"] = [9, 8, 7 + number]
    (files / f"{agent} in").mkdir()
    write_records(files / f"{agent} in" / "a.jsonl", *records)
    words = [*record_run.argv(files, agent, ratio=1), "--config", str(config)]
    place = words.index("--teacher-hf")
    del words[place : place + 2]
    words += ["--save", str(files / agent), "--load", str(files / agent)]
    (found,) = ranks.run(record_run.one_step, 1, words, files / "agent gradients")
    assert found["rollouts"].keys() == played["rollouts"].keys()
    completions = [
        Taught(one.request.ids, theirs.get(one.id), one.ids, one.loss) for one in found["rollouts"].values()
    ]
    plain_kl = dict(temperature=1.0, divergence="reverse_kl")
    terms = [Term(files / "teacher" if kind == "frozen" else None, completions)]
    loss = reference(files / "student", terms, files / "agent dense", plain_kl)
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "agent gradients", files / "agent dense")
    assert error <= 1e-5, where
    for flags in CP2:  # a run that resumes takes the same records
        results = ranks.run(record_run.one_step, 2, [*words, *map(str, flags)], files / "agent layout")
        for other in results:
            assert other["rollouts"].keys() == found["rollouts"].keys()
            for name, value in found["sums"].items():
                assert other["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
            for name in ("rollout/coverage", "rollout/teacher_nll", "rollout/kl_quarter_1"):
                assert other["figures"][name] == pytest.approx(found["figures"][name], abs=1e-5), name
        error, where = worst_relative_error(files / "agent layout", files / "agent dense")
        assert error <= 1e-5, where


MADE = {
    "user": "{prompt} like {sibling}",
    "fallbacks": ["{prompt} {feedback} {solution}", "{prompt} {feedback}"],
}
SUCCESS = 1.5


def made_prompts(rollouts: dict, files) -> list[Taught]:
    """Return completions with the prompts that siblings and feedback make, from the documentation alone."""
    hf = AutoTokenizer.from_pretrained(files / "student")
    stops = json.loads((files / "student" / "generation_config.json").read_text())["eos_token_id"]
    texts = {key: hf.decode(ids[:-1] if ids[-1] in stops else ids) for key, (_, ids, _) in rollouts.items()}
    said = {key: with_feedback("", text, {}) for key, text in texts.items()}
    found = []
    for (prompt, sample), (own, ids, _) in sorted(rollouts.items()):
        record = prompt_of(prompt)
        others = [key for key in rollouts if key[0] == prompt and key[1] != sample]
        best = max(others, key=lambda key: (said[key][0], -key[1]))
        values = {key: record[key] for key in ("solution",) if key in record}
        values |= {"sibling": texts[best]} if said[best][0] >= SUCCESS else {}
        values |= {"feedback": said[prompt, sample][1]} if said[prompt, sample][1] else {}
        _, theirs = prompts_of(record, hf, (MADE["user"], *MADE["fallbacks"]), values)
        found.append(Taught(own, theirs, ids))
    return found


def made_argv(files, run, *more, samples=4):
    teacher = {"hf": str(files / "teacher"), "name": "knows", "context": MADE | {"success": SUCCESS}}
    config = write_teachers(files / "made.yaml", teacher)
    reward = ("--reward", f"{REWARD}:with_feedback", "--samples-per-prompt", samples)
    return argv(files, run, config, *reward, *more)


def test_siblings_and_feedback_make_the_prompts_of_the_teacher(files, ranks):
    (found,) = ranks.run(one_step, 1, made_argv(files, "made"), files / "made gradients")
    completions = made_prompts(found["rollouts"], files)
    assert {one.theirs is None for one in completions} == {True, False}
    loss = reference(files / "student", [Term(files / "teacher", completions)], files / "made dense")
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    assert found["sums"]["loss"] == found["sums"]["kd"], "rewards have no loss"
    error, where = worst_relative_error(files / "made gradients", files / "made dense")
    assert error <= 1e-5, where
    for name, flags in (("DP2", ("--use-distributed-optimizer",)), ("CP2", CP2[0])):
        several = made_argv(files, f"made {name}", *flags)
        results = ranks.run(one_step, 2, several, files / "layout gradients")
        require_equal_steps(results, found, files, gradients="made gradients")


@SLOW
@pytest.mark.parametrize("ratio", [1, 0.5])
def test_a_teacher_of_such_prompts_on_processes_of_its_own(ratio, files, ranks, tmp_path):
    def made(run, *flags):
        return made_argv(files, f"{ratio} {run}", "--kd-ratio", ratio, *flags)

    Compared(ranks, tmp_path / "compared", made).check(tmp_path, SIDES["TP1 from PP2"])


def test_a_run_with_siblings_beside_a_policy_loss_resumes_bitwise(files, ranks):
    def run(folder, *more):
        flags = ("--kd-ratio", 0.5, "--save", files / folder, "--log-interval", 1, *more)
        results = run_main(ranks, made_argv(files, folder, *flags))
        assert results[0].exit_code == 0, results[0].stderr
        assert "3 prompts whose context each step makes" in results[0].stdout
        assert "without a context" not in results[0].stdout
        names = ("loss", "kd_loss", "num_aligned/knows", "rollout/coverage", "reward/mean", "grad_norm")
        return [[line[name] for name in names] for line in read_metrics(files / folder)]

    straight = run("made straight")
    run("made halves", "--exit-interval", 2)
    assert run("made halves", "--load", files / "made halves") == straight
    assert len(straight) == 4 and min(line[3] for line in straight) < 1


def test_a_teacher_without_a_context_beside_it(files, ranks):
    teachers = knowing({"hf": str(files / "teacher"), "weight": 3}), {"hf": str(files / "student")}
    config = write_teachers(files / "both.yaml", *teachers)
    (found,) = ranks.run(one_step, 1, argv(files, "both", config), files / "both gradients")
    completions = taught_of(found["rollouts"], files)
    plain = [Taught(one.own, one.own.tolist(), one.ids) for one in completions]
    terms = [Term(files / "teacher", completions, 0.75), Term(files / "student", plain, 0.25)]
    loss = reference(files / "student", terms, files / "both dense")
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "both gradients", files / "both dense")
    assert error <= 1e-5, where


@pytest.mark.parametrize("kind", KINDS)
def test_the_tag_of_a_prompt_chooses_a_teacher_with_a_context(kind, files, ranks):
    """Its mean over the tokens that it teaches has the share of its tag in all sampled tokens.

    One of the prompts of the other tag has no context, and needs none.
    """
    tags = ("a", "b", "b", "b", "a")
    prompts = [prompt_of(i) | {"kind": tag} for i, tag in enumerate(tags)]
    write_records(files / "tagged.jsonl", *prompts)
    model = {"hf": str(files / "teacher")} if kind == "frozen" else {"weights": "live"}
    others = {"hf": str(files / "student"), "name": "plain", "tags": ["b"]}
    kd = {"teacher_combination": "route", "tag_key": "kind"}
    teacher = knowing(model, missing="error") | {"tags": ["a"]}
    config = write_teachers(files / "routed.yaml", teacher, others, kd=kd)
    flags = ("--prompt-data-path", files / "tagged.jsonl")
    (found,) = ranks.run(one_step, 1, argv(files, "routed", config, *flags), files / "routed gradients")
    completions = taught_of(found["rollouts"], files)
    of_tag = {tag: [one for n, one in enumerate(completions) if tags[n // 2] == tag] for tag in "ab"}
    counts = {tag: sum(len(one.ids) for one in of) for tag, of in of_tag.items()}
    plain = [Taught(one.own, one.own.tolist(), one.ids) for one in of_tag["b"]]
    total, name = sum(counts.values()), KINDS[kind]
    terms = [
        Term(name and files / name, of_tag["a"], counts["a"] / total),
        Term(files / "student", plain, counts["b"] / total),
    ]
    loss = reference(files / "student", terms, files / "routed dense")
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "routed gradients", files / "routed dense")
    assert error <= 1e-5, where
    layout = argv(files, "routed layout", config, *flags, *TP2, "--sequence-parallel")
    results = ranks.run(one_step, 2, layout, files / "layout gradients")
    require_equal_steps(results, found, files, gradients="routed gradients")


@pytest.mark.parametrize("model", [{"weights": "live"}, {"hf": "student-base"}], ids=("live", "base"))
def test_a_lora_student_is_its_own_teacher(model, singles, files, ranks):
    """The adapters are 0 at first, so that both are the student."""
    config = write_teachers(files / "lora.yaml", knowing(model))
    arguments = argv(files, "lora", config, *TP2, "--sequence-parallel", "--lora-rank", 4)
    for found in ranks.run(one_step_alone, 2, arguments):
        assert found["kd"] == pytest.approx(singles["live"]["sums"]["kd"], rel=1e-5)
