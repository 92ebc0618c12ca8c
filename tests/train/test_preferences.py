"""Check losses of pairs: loss and gradients against transformers, at every layout, and resumed runs."""

from __future__ import annotations

import math

import pytest
from transformers import AutoTokenizer

from mkd.kinds.known_kinds import METRICS
from mkd.log.progress import MegatronLines
from tests.reported import reported_codes
from tests.train.command import read_metrics, run_main, write_records
from tests.train.invariance import worst_relative_error
from tests.train.preference_run import NUM_PAIRS, SIMPO, argv, make_files, one_step, pair_of, reference_loss
from tests.train.rollout_run import Case
from tests.train.test_resume import train_and_hash

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CP2, SP = ("--context-parallel-size", 2), ("--sequence-parallel",)
ALONE = ("--pack", "none", "--global-batch-size", NUM_PAIRS)  # a pair in each pack
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, *SP)),
    Case("PP2, other packing", 2, (*PP2, *ALONE, "--micro-batch-size", 2)),
    Case("CP2", 2, (*CP2, *ALONE)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
    Case("micro-batch 4, other order", 1, ("--micro-batch-size", 4, "--shuffle")),
)
SLOW_CASES = (
    Case("TP2", 2, TP2),
    Case("PP2", 2, PP2),
    Case("PP2 VPP2 CP2", 4, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2, *CP2, *ALONE)),
    Case("CP2 micro-batch 2", 2, (*CP2, *ALONE, "--micro-batch-size", 2)),
    Case("TP2 PP2 micro-batch 2", 4, (*TP2, *PP2, "--micro-batch-size", 2)),
    Case("PP2, reference ahead", 2, (*PP2, "--teacher-prefetch", 2)),
    Case("DP2, reference over 2 peers", 2, ("--teacher-residency", "peers", "--teacher-peers", 2)),
)
EVERY_LAYOUT = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=one.name) for one in CASES),
        *(pytest.param(one, id=one.name, marks=SLOW) for one in SLOW_CASES),
    ],
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def single(files, ranks):
    (found,) = ranks.run(one_step, 1, argv(files, "single"), files / "single")
    return found


def means(sums: dict[str, float], prefix: str = "dpo") -> dict[str, float]:
    """Return loss, margin and accuracy from the sums of a step."""
    names = dict(loss="loss", margin=f"{prefix}/margin", accuracy=f"{prefix}/accuracy")
    return {name: sums[key] / sums["num_loss_tokens"] for name, key in names.items()}


def test_loss_and_every_gradient_equal_transformers(single, files):
    """The documents are those of the records, in pairs."""
    tokenizer = AutoTokenizer.from_pretrained(files / "student")
    texts = [
        (record["prompt"], record[key])
        for record in (pair_of(i) for i in range(NUM_PAIRS))
        for key in ("chosen", "rejected")
    ]
    expected = [(*tokenizer(a)["input_ids"], *tokenizer(b)["input_ids"], 0) for a, b in texts]
    found = [tuple(tokens.tolist()) for tokens, *_ in single["documents"]]
    pairs = [list(zip(one[::2], one[1::2], strict=True)) for one in (found, expected)]
    assert sorted(pairs[0]) == sorted(pairs[1])
    reference = reference_loss(files, single["documents"], files / "dense")
    assert means(single["sums"]) == pytest.approx(reference, rel=1e-5)
    assert 0 < reference["accuracy"] < 1 and reference["loss"] != pytest.approx(math.log(2), rel=0.05)
    error, where = worst_relative_error(files / "single" / "gradients", files / "dense")
    assert error <= 1e-5, where


@EVERY_LAYOUT
def test_layout_packing_and_order_change_nothing(case, single, files, ranks):
    results = ranks.run(one_step, case.ranks, argv(files, "layout", *case.flags), files / "layout")
    assert all(found["sums"] == results[0]["sums"] for found in results)
    assert results[0]["sums"] == pytest.approx(single["sums"], rel=1e-5)
    error, where = worst_relative_error(*(files / name / "gradients" for name in ("layout", "single")))
    assert error <= 1e-5, where


@pytest.mark.parametrize("case", [Case("one process", 1), *CASES[:3]], ids=lambda case: case.name)
def test_simpo_equals_transformers_at_every_layout(case, single, files, ranks):
    """No reference runs, though the command line names a teacher."""
    arguments = argv(files, "simpo", *case.flags, loss=SIMPO)
    results = ranks.run(one_step, case.ranks, arguments, files / "simpo")
    expected = reference_loss(files, single["documents"], files / "dense simpo", SIMPO)
    assert all(means(found["sums"], "simpo") == pytest.approx(expected, rel=1e-5) for found in results)
    assert 0 < expected["accuracy"] < 1 and expected["margin"] != pytest.approx(0, abs=0.02)
    error, where = worst_relative_error(files / "simpo" / "gradients", files / "dense simpo")
    assert error <= 1e-5, where


def test_simpo_of_a_student_with_experts_equals_transformers(tmp_path, ranks):
    """Routers, every expert and all others, with the experts on two processes."""
    folder = make_files(tmp_path, "qwen3_moe")
    expert_parallel = ("--expert-model-parallel-size", 2)
    results = ranks.run(one_step, 2, argv(folder, "run", *expert_parallel, loss=SIMPO), folder / "simpo")
    documents = [document for found in results for document in found["documents"]]
    assert len(documents) == 2 * NUM_PAIRS
    expected = reference_loss(folder, documents, folder / "dense", SIMPO)
    assert all(means(found["sums"], "simpo") == pytest.approx(expected, rel=1e-5) for found in results)
    error, where = worst_relative_error(folder / "simpo" / "gradients", folder / "dense")
    assert error <= 1e-5, where


def test_simpo_under_interleaving_evaluates_and_resumes_bitwise(files, ranks):
    """No reference runs on any stage; Megatron's long lines have its metrics.

    The first half names a teacher, which nothing reads.
    """
    flags = (*PP2, "--num-virtual-stages-per-pipeline-rank", 2, "--log-format", "megatron")
    flags += ("--valid-data-path", files / "pairs.jsonl", "--eval-interval", 4)
    straight, halves = files / "simpo straight", files / "simpo halves"

    def train(folder, *more):
        arguments = argv(files, folder.name, *flags, "--save", folder, *more, reference=None, loss=SIMPO)
        return ranks.run(train_and_hash, 2, arguments)

    whole = train(straight)
    train(halves, "--exit-interval", 2, "--teacher-hf", files / "reference")
    assert train(halves, "--load", halves) == whole
    first, *steps, last = read_metrics(straight)
    again = [line["loss"] for line in read_metrics(halves) if "split" not in line]
    assert again == [line["loss"] for line in steps]
    assert first["split"] == last["split"] == "valid" and last["loss"] < first["loss"]
    assert last["simpo/margin"] > first["simpo/margin"] and last["simpo/accuracy"] > 0.5
    present = {key: value for key, value in steps[-1].items() if value is not None}
    line = MegatronLines(4, 4, METRICS.metrics).train(present)
    assert f"| simpo margin: {present['simpo/margin']:.4f} |" in line and "dpo" not in line


@pytest.mark.parametrize(
    "case", [Case("TP2", 2, TP2), pytest.param(Case("PP2 CP2", 4, (*PP2, *CP2, *ALONE)), marks=SLOW)]
)
def test_the_initial_student_is_the_reference_and_resuming_is_bitwise(case, files, ranks):
    """The first loss is ln 2, training lowers it, and a resumed run has the same reference."""
    straight, halves = files / f"straight {case.name}", files / f"halves {case.name}"
    flags = (*case.flags, "--valid-data-path", files / "pairs.jsonl", "--eval-interval", 4)

    def train(folder, *more):
        arguments = argv(files, folder.name, *flags, "--save", folder, *more, reference=None)
        return ranks.run(train_and_hash, case.ranks, arguments)

    whole = train(straight)
    train(halves, "--exit-interval", 2)
    assert train(halves, "--load", halves) == whole
    lines = read_metrics(straight)
    valid, steps = ([line for line in lines if ("split" in line) == is_valid] for is_valid in (True, False))
    again = [line for line in read_metrics(halves) if "split" not in line]
    assert [line["loss"] for line in again] == [line["loss"] for line in steps]
    assert len(valid) == 2 and len(steps) == 4
    for line in (valid[0], steps[0]):
        assert line["loss"] == pytest.approx(math.log(2), rel=1e-15)
        assert line["dpo/margin"] == 0 and line["dpo/accuracy"] == 0
    assert steps[-1]["loss"] < 0.6 and valid[-1]["dpo/accuracy"] > 0.9
    assert all(line["ce_loss"] is None and line["kd_loss"] is None for line in lines)


@EVERY_LAYOUT
def test_equal_weights_give_equal_bits_with_and_without_gradients(case, files, ranks):
    """Otherwise a margin of rounding errors would count as an answer that is preferred."""
    arguments = argv(files, f"equal {case.name}", *case.flags, reference=None)
    for found in ranks.run(one_step, case.ranks, arguments, files / "equal"):
        assert found["sums"]["dpo/margin"] == found["sums"]["dpo/accuracy"] == 0


def test_the_command_says_what_it_does_and_skips_bad_pairs(files, ranks):
    bad = {"prompt": "p", "chosen": "same", "rejected": "same"}
    path = write_records(files / "bad.jsonl", *(pair_of(i) for i in range(4)), bad)
    arguments = argv(files, "command", "--data-path", path, reference=None)
    (result,) = run_main(ranks, arguments)
    assert result.exit_code == 65 and reported_codes(result.stderr) == [
        "pair-not-valid: chosen and rejected are the same"
    ]
    (result,) = run_main(ranks, [*arguments, "--max-bad-records", "1", "--global-batch-size", "2"])
    assert result.exit_code == 0, result.stderr
    assert "bad.jsonl:5" not in result.stderr and "  margin " in result.stdout
    assert "chosen and rejected" in (files / "command" / "quarantine.jsonl").read_text()
    card = (files / "command" / "loss_card.txt").read_text()
    assert "-ln sigmoid(z), z = 0.3" in card and "reference student" in card
    text = write_records(files / "t.jsonl", {"text": "a"})
    (result,) = run_main(ranks, [*arguments, "--data-path", str(text)])
    assert result.exit_code == 65 and reported_codes(result.stderr) == [
        "pairs-and-others: has no preference pairs"
    ]
