"""Text of all kinds for teachers on processes of their own: the results are those of teachers beside it."""

from __future__ import annotations

import json

import pytest

from tests.ranks import RankPool
from tests.tiny_models import make_model
from tests.train import context_rollout_run, context_run, preference_run, record_run, reward_run, rollout_run
from tests.train.sides_text import PP2, SIDES, Compared, Sides
from tests.xtoken.small_tokenizers import train_byte_level

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def pool():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def rollout_files(tmp_path_factory):
    return rollout_run.make_files(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="module")
def rollouts(pool, rollout_files):
    def argv(run, *flags):
        return rollout_run.argv(rollout_files, run, *flags)

    return Compared(pool, rollout_files / "whole", argv)


ON_ROLLOUTS = (
    "TP1 from PP2",
    "TP2 + SP from CP2",
    "PP2 from TP2",
    "PP2 VPP2 from 1",
    "DP2 from 1",
    "1 from DP2",
    "CP2 from TP2",
)


@SLOW
@pytest.mark.parametrize("case", ON_ROLLOUTS)
def test_completions_of_the_student(rollouts, tmp_path, case):
    """Nothing is asked for before completions exist, and nothing is left over."""
    rollouts.check(tmp_path, SIDES[case])


@SLOW
@pytest.mark.parametrize("case", ["TP1 from PP2", "PP2 VPP2 from 1"])
def test_completions_beside_stored_packs(pool, rollout_files, tmp_path, case):
    def argv(run, *flags):
        return rollout_run.argv(rollout_files, run, *flags, fraction=0.5)

    Compared(pool, tmp_path / "half", argv).check(tmp_path, SIDES[case])


@SLOW
@pytest.mark.parametrize("case", ["TP1 from PP2", "DP2 from 1"])
def test_a_policy_loss_with_a_divergence_from_a_reference(pool, rollout_files, tmp_path, case):
    def argv(run, *flags):
        return reward_run.argv(rollout_files, run, "--rollout-updates", 2, *flags)

    Compared(pool, tmp_path / "grpo", argv).check(tmp_path, SIDES[case])


@pytest.fixture(scope="module")
def records(pool, rollout_files):
    """Return runs on records of agents, with a reward that has three quarters of the weight."""

    def argv(run, *flags):
        return record_run.argv(rollout_files, f"records {run}", *flags)

    def beside(run):
        return record_run.playing(rollout_files, f"records {run}")

    return Compared(pool, rollout_files / "records", argv, beside)


@SLOW
@pytest.mark.parametrize("case", ["TP1 from PP2", "CP2 from TP2"])
def test_records_of_agents(records, tmp_path, case):
    records.check(tmp_path, SIDES[case])


@pytest.fixture(scope="module")
def context_files(tmp_path_factory):
    return context_rollout_run.make_rollout_files(tmp_path_factory.mktemp("contexts"))


@pytest.fixture(scope="module")
def contexts(pool, context_files):
    """Return runs on records, of which some have no context."""

    def argv(run, *flags):
        return context_run.argv(context_files, run, *flags)

    return Compared(pool, context_files / "stored", argv)


ON_CONTEXTS = (
    *("TP1 from PP2", "TP2 + SP from CP2", "PP2 from TP2", "PP2 VPP2 from 1", "DP2 from 1", "CP2 from TP2"),
    "TP2 from CP2 PP2",
)


@SLOW
@pytest.mark.parametrize("case", ON_CONTEXTS)
def test_a_teacher_with_a_context(contexts, tmp_path, case):
    """It reads another row than the student, of another length."""
    contexts.check(tmp_path, SIDES[case])


@pytest.fixture(scope="module")
def context_rollouts(pool, context_files):
    """Return runs on completions, which the teacher reads after prompts of its own."""
    teacher = {"hf": str(context_files / "teacher")}
    config = context_rollout_run.write_teachers(
        context_files / "rollouts.yaml", context_rollout_run.knowing(teacher)
    )

    def argv(run, *flags):
        return context_rollout_run.argv(context_files, run, config, *flags)

    return Compared(pool, context_files / "rollouts", argv)


@pytest.mark.parametrize(
    "case", [ON_CONTEXTS[0], *(pytest.param(one, marks=SLOW) for one in ON_CONTEXTS[1:])]
)
def test_completions_after_prompts_of_the_teacher(context_rollouts, tmp_path, case):
    context_rollouts.check(tmp_path, SIDES[case])


@pytest.fixture(scope="module")
def aligned_files(tmp_path_factory):
    """Make a student, and a teacher with another tokenizer and a larger vocabulary."""
    folder = rollout_run.make_files(tmp_path_factory.mktemp("aligned"))
    sizes = dict(hidden_size=56, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    make_model(folder / "cross", "qwen2", seed=7, vocab_size=620, **sizes | rollout_run.EOS)
    train_byte_level(600).save_pretrained(folder / "cross")
    teacher = {"name": "cross", "hf": str(folder / "cross"), "xtoken": {}}
    settings = {"student": {"hf": str(folder / "student")}, "teachers": [teacher]}
    (folder / "cross.yaml").write_text(json.dumps(settings))
    return folder


def aligned_argv(files, run, *flags):
    words = ("--student-hf", files / "student", "--config", files / "cross.yaml", "--kd-ratio", 1)
    words += ("--kd-divergence", "reverse_kl", "--seq-length", 48, "--train-iters", 4, "--lr", 1e-3)
    words += ("--log-dir", files / run, "--data-cache-path", files / "cache")
    return [str(word) for word in (*words, *flags)]


def aligned_on_policy(files, run, *flags):
    prompts = ("--on-policy-fraction", 1, "--prompt-data-path", files / "prompts.jsonl")
    sizes = ("--rollout-prompts", 5, "--samples-per-prompt", 2, "--max-new-tokens", 20)
    return aligned_argv(files, run, *prompts, *sizes, "--global-batch-size", 4, *flags)


@pytest.fixture(scope="module")
def aligned(pool, aligned_files):
    """Return runs whose steps have each text in a pack of its own."""

    def argv(run, *flags):
        text = ("--data-path", aligned_files / "text.jsonl", "--pack", "none", "--global-batch-size", 8)
        return aligned_argv(aligned_files, run, "--no-shuffle", *text, *flags)

    return Compared(pool, aligned_files / "stored", argv)


@pytest.mark.parametrize(
    "case", [ON_CONTEXTS[0], *(pytest.param(one, marks=SLOW) for one in ON_CONTEXTS[1:])]
)
def test_a_teacher_with_another_tokenizer(aligned, tmp_path, case):
    """Its row and its vocabulary are its own."""
    aligned.check(tmp_path, SIDES[case])


@pytest.fixture(scope="module")
def aligned_rollouts(pool, aligned_files):
    """Return runs on completions, whose bytes become the teacher's tokens."""

    def argv(run, *flags):
        return aligned_on_policy(aligned_files, run, *flags)

    return Compared(pool, aligned_files / "rollouts", argv)


@SLOW
@pytest.mark.parametrize(
    "case", ["TP1 from PP2", "TP2 + SP from CP2", "PP2 from TP2", "DP2 from 1", "CP2 from TP2"]
)
def test_completions_in_the_tokens_of_the_teacher(aligned_rollouts, tmp_path, case):
    aligned_rollouts.check(tmp_path, SIDES[case])


@pytest.fixture(scope="module")
def preferences(pool, tmp_path_factory):
    """Return runs on preference pairs with a reference, a pair in each pack."""
    files = preference_run.make_files(tmp_path_factory.mktemp("preferences"))
    alone = ("--pack", "none", "--global-batch-size", preference_run.NUM_PAIRS)

    def argv(run, *flags):
        return preference_run.argv(files, run, *alone, *flags)

    return Compared(pool, files / "pairs", argv)


@SLOW
@pytest.mark.parametrize(
    "case", ["TP1 from PP2", "TP2 + SP from CP2", "PP2 from TP2", "DP2 from 1", "CP2 from TP2"]
)
def test_a_reference_of_preference_pairs(preferences, tmp_path, case):
    preferences.check(tmp_path, SIDES[case])


@SLOW
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_teachers_of_all_rows_beside_each_other(pool, aligned_files, tmp_path, shared):
    """One has the student's row, one a context, one another tokenizer. One shares the student's processes."""
    models = [
        {"name": "here", "hf": str(aligned_files / "second")},
        {"name": "knows", "hf": str(aligned_files / "teacher"), "context": {"user": "the fox: {prompt}"}},
        {"name": "cross", "hf": str(aligned_files / "cross"), "xtoken": {}, "weight": 2},
    ]
    layouts = [{"processes": 2, "pipeline_model_parallel_size": 2}, {"processes": 1}]
    layouts.insert(shared, {})
    for name, own in (("alone", ({}, {}, {})), ("sides", layouts)):
        teachers = [model | layout for model, layout in zip(models, own, strict=True)]
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"teachers": teachers}))

    def argv(run, *flags):
        return aligned_on_policy(aligned_files, run, "--config", tmp_path / "alone.yaml", *flags)

    sides = Sides(2, PP2, ("--config", str(tmp_path / "sides.yaml")), several=3)
    (tmp_path / "run").mkdir()
    Compared(pool, tmp_path / "several", argv).check(tmp_path / "run", sides)
