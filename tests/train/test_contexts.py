"""Check teachers that read another prompt: loss and gradients against transformers at every layout."""

from __future__ import annotations

import json

import pytest

from tests.reported import reported_codes
from tests.train.command import read_metrics, run_main, write_records
from tests.train.context_run import HINT, NUM_RECORDS, argv, make_files, record_of, reference, write_config
from tests.train.invariance import worst_relative_error
from tests.train.preference_run import one_step
from tests.train.rollout_run import Case

TP2, PP2, CP2 = ((f"--{name}-parallel-size", 2) for name in ("tensor-model", "pipeline-model", "context"))
SP, VPP2 = ("--sequence-parallel",), ("--num-virtual-stages-per-pipeline-rank", 2)
CASES = (
    Case("one process"),
    Case("TP2 + sequence parallel", 2, (*TP2, *SP)),
    Case("PP2", 2, PP2),
    Case("PP2 VPP2", 2, (*PP2, *VPP2)),
    Case("CP2 micro-batch 2", 2, (*CP2, "--micro-batch-size", 2)),
    pytest.param(Case("TP2 CP2 + sequence parallel", 4, (*TP2, *CP2, *SP)), marks=pytest.mark.slow),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("contexts"))


@pytest.fixture(scope="module")
def dense(files):
    return reference(files, files / "dense")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_every_gradient_equal_transformers_at_every_layout(case, dense, files, ranks):
    results = ranks.run(one_step, case.ranks, argv(files, case.name, *case.flags), files / "layout")
    for found in results:
        sums = found["sums"]
        assert sums["num_loss_tokens"] == dense["num_loss_tokens"]
        for key in ("ce", "kd", "loss"):
            assert sums[key] / sums["num_loss_tokens"] == pytest.approx(dense[key], rel=1e-5), key
    error, where = worst_relative_error(files / "layout" / "gradients", files / "dense")
    assert error <= 1e-5, where


@pytest.fixture(scope="module")
def dense_live(files):
    return reference(files, files / "dense live", live=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_student_may_be_its_own_teacher_at_every_layout(case, dense_live, files, ranks):
    config = write_config(files, live=True)
    arguments = argv(files, f"live {case.name}", *case.flags, config=config)
    for found in ranks.run(one_step, case.ranks, arguments, files / "live layout"):
        sums = found["sums"]
        for key in ("ce", "kd", "loss"):
            assert sums[key] / sums["num_loss_tokens"] == pytest.approx(dense_live[key], rel=1e-5), key
    error, where = worst_relative_error(files / "live layout" / "gradients", files / "dense live")
    assert error <= 1e-5, where


def test_a_live_teacher_follows_the_student_and_resumes(files, ranks):
    """On the student's own prompt it teaches nothing, after an update neither: it has the new weights."""
    config = files / "same.yaml"
    teacher = {"weights": "live", "context": {"user": "{prompt}"}}
    config.write_text(json.dumps({"teachers": [teacher]}))
    records = (record_of(i) for i in range(NUM_RECORDS) if i % 4 != 3)  # these have prompts of their own
    data = ("--data-path", write_records(files / "same.jsonl", *records))
    flags = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    arguments = argv(files, "same", *flags, *data, "--save", files / "same saved", config=config)
    for words in ([*arguments, "--exit-interval", "2"], [*arguments, "--load", str(files / "same saved")]):
        result = run_main(ranks, words, 2)[0]
        assert result.exit_code == 0, result.stderr
    lines = read_metrics(files / "same")
    assert len(lines) == 4 and len({line["ce_loss"] for line in lines}) == 4
    assert max(abs(line["kd_loss"]) for line in lines) < 1e-6


def test_the_frozen_weights_of_a_lora_student_know_more(files, ranks):
    """The adapters are 0 at first: the student is its own teacher, and only the context differs."""
    config = files / "base.yaml"
    context = {"user": HINT, "missing": "skip"}
    config.write_text(json.dumps({"teachers": [{"hf": "student-base", "context": context}]}))
    expected = reference(files, files / "dense base", live=True)["kd"]
    arguments = argv(files, "lora", *TP2, *SP, "--lora-rank", 4, config=config)
    for found in ranks.run(one_step, 2, arguments, files / "lora out"):
        assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "kd",
    [{"teacher_weighting": "ce"}, pytest.param({"teacher_combination": "select"}, marks=pytest.mark.slow)],
)
def test_a_run_with_two_teachers_resumes(kd, dense, files, ranks):
    teachers = [
        {"hf": str(files / "teacher"), "name": "knows", "context": {"user": HINT, "missing": "skip"}},
        {"hf": str(files / "student"), "name": "plain"},
    ]
    name, config = "-".join(kd.values()), files / "two.yaml"
    config.write_text(json.dumps({"teachers": teachers, "kd": kd}))
    save = ("--valid-data-path", files / "records.jsonl", "--save", files / name)
    arguments = argv(files, f"{name} run", *TP2, *save, config=config)
    whole = argv(files, f"{name} whole", *TP2, *save[:2], "--no-save", config=config)
    for words in (whole, [*arguments, "--exit-interval", "2"], [*arguments, "--load", str(files / name)]):
        result = run_main(ranks, words, 2)[0]
        assert result.exit_code == 0, result.stderr
    assert "knows does not teach 19 loss tokens of the corpus: earlier turns" in result.stdout
    assert "prompts end with " in result.stdout
    found, expected = (
        {(one["iteration"], one.get("split")): one for one in read_metrics(files / f"{name} {which}")}
        for which in ("run", "whole")
    )
    assert len(found) == 7 and len(expected) == 6, "four steps, two evaluations, and one at the stop"
    for place in expected:
        one = found[place]
        assert {key: one[key] for key in ("loss", "kd_loss")} == {
            key: expected[place][key] for key in ("loss", "kd_loss")
        }, place
        assert one["num_aligned/knows"] == dense["num_taught"] == one["num_aligned/plain"] - 19
        assert 0 < one["teacher_weight/knows"] < 1
    card = (files / f"{name} run" / "loss_card.txt").read_text()
    assert "after a prompt of the teacher's own" in card


def test_what_has_no_context_is_refused(files, ranks):
    def codes(*more, **context):
        config = write_config(files, **context)
        (result,) = run_main(ranks, argv(files, "refused", "--no-save", *more, config=config))
        assert result.exit_code != 0
        return [one.partition(":")[0] for one in reported_codes(result.stderr)], result.stderr

    found, text = codes(missing="error")
    assert found == ["record-value-not-valid"] and "no context for the teacher knows" in text
    prefix = next((files / "cache").glob("records-*.idx")).with_suffix("")
    found, _ = codes("--data-path", prefix)
    assert found == ["corpus-of-another-model"]
