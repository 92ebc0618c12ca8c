"""Check teachers that average the student's weights: the average, and the losses and gradients beside it."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train import context_rollout_run, preference_run, reward_run, rollout_run
from tests.train.command import read_metrics, run_main
from tests.train.context_rollout_run import knowing, make_rollout_files, write_teachers
from tests.train.context_run import HINT, TEMPLATE, make_files
from tests.train.ema_run import RATE, SMOOTH, average_updates, averages_alone, dense_reference, ema_argv
from tests.train.invariance import worst_relative_error
from tests.train.rollout_run import EOS, Case
from tests.train.saved_state import saved_state

TP2, PP2, CP2 = ((f"--{name}-parallel-size", 2) for name in ("tensor-model", "pipeline-model", "context"))
SP, VPP2 = ("--sequence-parallel",), ("--num-virtual-stages-per-pipeline-rank", 2)
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = ("--expert-model-parallel-size", 2)
RATES = ("swift", 0.9), ("slow", 0.1)
HOST = (*DISTRIBUTED, "--optimizer-residency", "host")
CASES = (
    Case("one process"),
    Case("TP2 + sequence parallel", 2, (*TP2, *SP)),
    Case("PP2", 2, PP2),
    Case("PP2 VPP2", 2, (*PP2, *VPP2)),
    Case("CP2", 2, CP2),
    pytest.param(Case("TP2 CP2 + sequence parallel", 4, (*TP2, *CP2, *SP)), marks=pytest.mark.slow),
    Case("DP2 + distributed optimizer", 2, DISTRIBUTED),
    pytest.param(Case("DP2 overlapped", 2, OVERLAPPED), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("ema"))
    add_tokenizer(make_model(folder / "experts", "qwen3_moe", seed=3, num_hidden_layers=2, **EOS))
    (folder / "experts" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def dense(files):
    return dense_reference(files, files / "dense")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_gradients_after_three_updates_equal_transformers(case, dense, files, ranks):
    arguments = ema_argv(files, case.name, *case.flags, *SMOOTH)
    for found in ranks.run(average_updates, case.ranks, arguments, files / "layout"):
        sums = found["sums"]
        assert sums["num_loss_tokens"] == dense["num_loss_tokens"]
        for key in ("ce", "kd", "loss"):
            assert sums[key] / sums["num_loss_tokens"] == pytest.approx(dense[key], rel=1e-5), key
        assert found["error"] <= 1.2e-7 and found["moved"] > 0.5 * found["of"], found
    error, where = worst_relative_error(files / "layout" / "gradients", files / "dense")
    assert error <= 1e-5, where


TWO = {"name": "a"}, {"name": "b", "context": None, "ema": {"rate": 0.05, "every": 2}}
"""Two teachers that average at different speeds, the second one without a context."""


@pytest.mark.parametrize(
    "case, teachers",
    [
        (Case("bf16 DP2 overlapped", 2, OVERLAPPED), ({},)),
        (Case("bf16 PP2 tied embedding, two averages", 2, PP2), TWO),
        (Case("bf16 experts EP2 DP2", 2, (*DISTRIBUTED, *EXPERTS)), ({"context": None},)),
        pytest.param(Case("bf16 optimizer on the host", 1, HOST), ({},), marks=pytest.mark.slow),
        pytest.param(Case("bf16 DP2", 2, DISTRIBUTED), ({"ema": {"every": 3}},), marks=pytest.mark.slow),
        pytest.param(Case("bf16 experts EP2 alone", 2, EXPERTS), ({},), marks=pytest.mark.slow),
        pytest.param(
            Case("bf16 TP2 DP2", 4, (*TP2, *SP, *DISTRIBUTED)), ({"context": None},), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_in_bf16_every_weight_is_the_rounded_average(case, teachers, files, ranks):
    """A skipped update does not move it."""
    arguments = ema_argv(files, case.name, *case.flags, "--bf16", "--lr", 1e-5, teachers=teachers)
    if EXPERTS[0] in case.flags:
        arguments[arguments.index("--student-hf") + 1] = str(files / "experts")
    for found in ranks.run(averages_alone, case.ranks, arguments, 6):
        assert found["wrong"] == 0 and found["moved"] > 0, found


@pytest.mark.parametrize(
    "case",
    [
        Case("LoRA DP2", 2, DISTRIBUTED),
        pytest.param(Case("LoRA TP2", 2, (*TP2, *SP)), marks=pytest.mark.slow),
    ],
    ids=lambda case: case.name,
)
def test_adapters_are_averaged(case, files, ranks):
    """The frozen weights are the student's own."""
    arguments = ema_argv(files, case.name, *case.flags, "--lora-rank", 4, "--lr", 1e-2)
    for found in ranks.run(averages_alone, case.ranks, arguments, 3):
        assert found["error"] <= 1.2e-7 and found["moved"] > 0, found


def test_a_run_resumes_with_the_same_bits_and_with_another_layout(files, ranks):
    """It stops between two moves of the average."""
    context = {"user": HINT, "missing": "skip"}
    teachers = ({"ema": {"rate": RATE, "every": 2}, "context": context},)

    def run(name, load, *more, layout=DISTRIBUTED):
        words = ema_argv(files, name, *SMOOTH, *layout, "--save", files / f"{name} saved", teachers=teachers)
        words += ["--train-iters", "6", *map(str, more)]
        words += ["--load", str(files / f"{load} saved")] if load else []
        result = run_main(ranks, words, 2)[0]
        assert result.exit_code == 0, result.stderr
        return {one["iteration"]: one["kd_loss"] for one in read_metrics(files / name)}

    whole = run("whole", None)
    run("half", None, "--exit-interval", 3)
    shutil.copytree(files / "half saved", files / "other saved")
    resumed = run("half", "half")
    last = [saved_state(files / f"{name} saved" / "iter_0000006") for name in ("whole", "half")]
    assert last[0] == last[1] and resumed == whole
    other = run("other", "other", layout=(*DISTRIBUTED, *TP2, *SP))
    assert other.keys() == {4, 5, 6}
    assert other == {iteration: pytest.approx(whole[iteration], rel=1e-5) for iteration in other}
    assert abs(whole[6] / whole[2] - 1) > 1e-3  # the average has moved


def test_averages_of_another_order_are_found_by_the_names_of_their_teachers(files, ranks):
    """Each had the average of the teacher that stood in its place."""
    context = {"user": HINT, "missing": "skip"}
    swift, slow = ({"name": name, "ema": {"rate": rate}, "context": context} for name, rate in RATES)

    def run(name, teachers, *more):
        words = ema_argv(files, name, *SMOOTH, "--save", str(files / "swap saved"), *more, teachers=teachers)
        return run_main(ranks, [*words, "--train-iters", "4", "--save-interval", "2"], 1)[0]

    def losses(name):
        found = [one for one in read_metrics(files / name) if one["iteration"] > 2]
        return [one[f"kd_loss/{teacher}"] for one in found for teacher, _ in RATES]

    again = ("--load", str(files / "swap saved"), "--ckpt-step", "2", "--accept-change", "loss")
    result = run("straight", (swift, slow))
    assert result.exit_code == 0, result.stderr
    result = run("renamed", (swift, slow | {"name": "other"}), *again)
    assert result.exit_code == 66 and "no average of the student's weights of teacher other" in result.stderr
    result = run("turned", (slow, swift), *again)
    assert result.exit_code == 0, result.stderr
    expected = losses("straight")
    assert len(expected) == 4 and abs(expected[0] / expected[1] - 1) > 0.1
    assert losses("turned") == pytest.approx(expected, rel=1e-5)


def test_an_average_that_is_the_student_teaches_nothing(files, ranks):
    """On the student's own prompt and with rate 1, also after updates."""
    config = ema_argv(files, "same", teachers=({"context": None, "ema": {"rate": 1}},))
    result = run_main(ranks, [*config, "--self-teacher", "ema", *map(str, OVERLAPPED)], 2)[0]
    assert result.exit_code == 0, result.stderr
    lines = read_metrics(files / "same")
    assert len(lines) == 4 and max(abs(line["kd_loss"]) for line in lines) < 1e-6
    assert "averages the student's weights: after 1 update, at most half" in result.stdout
    assert "x the student's after every update" in (files / "same" / "loss_card.txt").read_text()


def test_after_a_context_it_judges_completions_as_a_live_teacher_does(tmp_path, ranks):
    """With rate 1 the average is the student, which `live` is too: all losses have the same bits."""
    files = make_rollout_files(tmp_path / "own")
    losses = []
    for name, weights in (("ema", {"weights": "ema", "ema": {"rate": 1}}), ("live", {"weights": "live"})):
        config = write_teachers(files / f"{name}.yaml", knowing(weights))
        words = context_rollout_run.argv(files, name, config, *DISTRIBUTED, "--train-iters", 3)
        result = run_main(ranks, words, 2)[0]
        assert result.exit_code == 0, result.stderr
        losses.append([line["kd_loss"] for line in read_metrics(files / name)])
    assert losses[0] == losses[1] and len(losses[0]) == 3 and min(losses[0]) > 1e-4


ADAPTERS = ("--lora-rank", 4, "--lr", 1e-2)
REWARDED = ("--reward", f"{reward_run.REWARD}:with_feedback", "--kd-ratio", 0.5, "--samples-per-prompt", 3)


@pytest.mark.slow
@pytest.mark.parametrize("more", [ADAPTERS, REWARDED, (*REWARDED, "--rollout-updates", 2)])
def test_beside_adapters_and_rewards_it_is_as_a_live_teacher(more, tmp_path, ranks):
    """With rate 1, after a context, on the student's own text: all figures have the same bits."""
    files, found = make_rollout_files(tmp_path / "own"), []
    for name, weights in (("ema", {"weights": "ema", "ema": {"rate": 1}}), ("live", {"weights": "live"})):
        config = write_teachers(files / f"{name}.yaml", knowing(weights))
        words = context_rollout_run.argv(files, name, config, *DISTRIBUTED, "--train-iters", 3, *more)
        result = run_main(ranks, words, 2)[0]
        assert result.exit_code == 0, result.stderr
        names = ("loss", "kd_loss", "grad_norm", "rollout/length")
        found.append([[line[name] for name in names] for line in read_metrics(files / name)])
    assert found[0] == found[1] and len(found[0]) == 3
    assert all(kd > 1e-5 and norm > 0 for _, kd, norm, _ in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("more", [ADAPTERS, REWARDED])
def test_on_own_text_the_teacher_has_the_average_of_the_updates(more, tmp_path, ranks):
    files = make_rollout_files(tmp_path / "own")
    config = write_teachers(files / "ema.yaml", knowing({"weights": "ema", "ema": {"rate": RATE}}))
    words = context_rollout_run.argv(files, "ema", config, *DISTRIBUTED, *more)
    for found in ranks.run(averages_alone, 2, words, 3):
        assert found["error"] <= 1.2e-7 and found["moved"] > 0, found


@pytest.mark.slow
def test_teachers_and_references_follow_the_student(tmp_path, ranks):
    """With rate 1 the average is the student: it teaches nothing, and DPO has the loss ln 2 at every step.

    Nor does it as the reference of GRPO, also after each of several updates of a step.
    """
    own_text, pairs = rollout_run.make_files(tmp_path / "own"), preference_run.make_files(tmp_path / "pairs")
    config = tmp_path / "same.yaml"
    config.write_text(json.dumps({"teachers": [{"weights": "ema", "ema": {"rate": 1}}]}))
    words = rollout_run.argv(own_text, "run", *DISTRIBUTED, "--config", config)
    place = words.index("--teacher-hf")
    del words[place : place + 2]
    grpo = reward_run.argv(own_text, "rewarded", *DISTRIBUTED, "--config", config, "--rollout-updates", 2)
    place = grpo.index("--teacher-hf")
    del grpo[place : place + 2]
    dpo = preference_run.argv(pairs, "run", *DISTRIBUTED, "--config", config, reference=None)
    runs = ((words, own_text / "run"), (grpo, own_text / "rewarded"), (dpo, pairs / "run"))
    for arguments, folder in runs:
        result = run_main(ranks, arguments, 2)[0]
        assert result.exit_code == 0, result.stderr
        lines = read_metrics(folder)
        assert len(lines) == 4, lines
        if arguments is not dpo:
            assert max(abs(line["kd_loss"]) for line in lines) < 1e-6 and lines[0]["rollout/length"] > 0
            assert len({line["grad_norm"] for line in lines}) == 4 or arguments is words
        else:
            assert all(line["loss"] == pytest.approx(math.log(2), abs=1e-6) for line in lines)


def test_a_checkpoint_without_the_average_is_refused(files, ranks):
    save = ("--save", files / "frozen saved", "--train-iters", 1)
    teacher = {"weights": None, "ema": None, "hf": "student-initial"}
    frozen = ema_argv(files, "frozen", *save, teachers=(teacher,))
    assert run_main(ranks, frozen)[0].exit_code == 0
    load = ("--load", files / "frozen saved", "--accept-change", "loss")
    resumed = ema_argv(files, "frozen", *save[:2], *load)
    result = run_main(ranks, resumed)[0]
    assert [one.partition(":")[0] for one in reported_codes(result.stderr)] == ["optimizer-state-differs"]
