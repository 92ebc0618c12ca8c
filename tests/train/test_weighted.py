"""Check records with weights: loss and gradients against transformers at every layout, and whole runs."""

from __future__ import annotations

import pytest

from tests.reported import reported_codes
from tests.train.command import read_metrics, run_main, write_records
from tests.train.invariance import worst_relative_error
from tests.train.preference_run import make_files, one_step, pair_of, sum_logp
from tests.train.rollout_run import Case
from tests.train.test_preferences import CP2, PP2, SP, TP2

WEIGHTS = (0.25, 1.0, 3.5)
NUM_RECORDS, NUM_PACKS = 12, 4
CASES = (
    Case("one process", 1),
    Case("TP2 + sequence parallel", 2, (*TP2, *SP)),
    Case("PP2, a record in each pack", 2, (*PP2, "--pack", "none", "--global-batch-size", NUM_RECORDS)),
    Case("CP2 micro-batch 2", 2, (*CP2, "--micro-batch-size", 2)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
)


def weight_of(i: int) -> float:
    return WEIGHTS[i % len(WEIGHTS)]


def record_of(i: int) -> dict:
    return {"prompt": pair_of(i)["prompt"], "completion": pair_of(i)["chosen"], "score": weight_of(i)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("weighted"))
    write_records(folder / "weighted.jsonl", *(record_of(i) for i in range(NUM_RECORDS)))
    return folder


def argv(files, run, *more, key="score", ratio=0) -> list[str]:
    words = ["--student-hf", files / "student", "--data-path", files / "weighted.jsonl", "--kd-ratio", ratio]
    words += ["--weight-key", key] if key else []
    words += ["--seq-length", 48, "--no-shuffle", "--global-batch-size", NUM_PACKS, "--lr", 1e-3]
    words += ["--train-iters", 4, "--log-dir", files / run, "--data-cache-path", files / "cache"]
    return [str(word) for word in (*words, *more)]


def reference_loss(folder, documents, out_dir) -> dict[str, float]:
    """Write float64 gradients of transformers as a folder; return both cross entropies per token."""
    from tests.train.hf_gradients import load

    student, texts = load(folder / "student"), load_texts(folder)
    weights = [texts[tuple(tokens.tolist())] for tokens, *_ in documents]
    losses = [-sum_logp(student, *document) for document in documents]
    counts = [int(mask.sum()) for *_, mask in documents]
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    weighted = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / total
    weighted.backward()
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return {"weighted_ce_loss": weighted.item(), "ce": sum(losses).item() / sum(counts)}


def load_texts(folder) -> dict[tuple[int, ...], float]:
    """Return tokens -> weight of the records."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(folder / "student")
    records = (record_of(i) for i in range(NUM_RECORDS))
    return {
        (*encode(one["prompt"])["input_ids"], *encode(one["completion"])["input_ids"], 0): one["score"]
        for one in records
    }


def means(sums: dict[str, float]) -> dict[str, float]:
    return {key: sums[key] / sums["num_loss_tokens"] for key in ("weighted_ce_loss", "ce")}


@pytest.fixture(scope="module")
def single(files, ranks):
    (found,) = ranks.run(one_step, 1, argv(files, "single"), files / "single")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_every_gradient_equal_transformers_at_every_layout(case, single, files, ranks):
    dense = files / "dense"
    expected = reference_loss(files, single["documents"], dense)
    assert len(single["documents"]) == NUM_RECORDS  # a step has all of them
    assert expected["weighted_ce_loss"] != pytest.approx(expected["ce"], rel=1e-3)
    results = ranks.run(one_step, case.ranks, argv(files, case.name, *case.flags), files / "layout")
    for found in results:
        assert means(found["sums"]) == pytest.approx(expected, rel=1e-5)
        assert found["sums"]["loss"] == found["sums"]["weighted_ce_loss"]
    error, where = worst_relative_error(files / "layout" / "gradients", dense)
    assert error <= 1e-5, where


def test_weights_change_the_cross_entropy_beside_a_divergence_alone(files, ranks):
    teacher = ("--teacher-hf", files / "student", "--kd-divergence", "jsd", "--kd-temperature", 2)
    found = {}
    for key in ("score", None):
        arguments = argv(files, f"beside {key}", *teacher, *TP2, key=key, ratio=0.25)
        found[key] = ranks.run(one_step, 2, arguments, files / f"beside {key}")[0]["sums"]
    weighted, plain = found["score"], found[None]
    for key in ("ce", "kd", "num_loss_tokens", "teacher_ce"):
        assert weighted[key] == pytest.approx(plain[key], rel=1e-6)
    assert weighted["loss"] == pytest.approx(0.75 * weighted["weighted_ce_loss"] + 0.25 * weighted["kd"])
    assert weighted["loss"] != pytest.approx(plain["loss"], rel=1e-3)


def test_equal_weights_are_the_cross_entropy(files, ranks):
    same = write_records(files / "same.jsonl", *(record_of(i) | {"score": 0.3} for i in range(NUM_RECORDS)))
    found = {
        key: ranks.run(one_step, 1, argv(files, f"s{key}", "--data-path", same, key=key), files / f"s{key}")
        for key in ("score", None)
    }
    sums = {key: one["sums"] for key, (one,) in found.items()}
    assert sums["score"]["loss"] == pytest.approx(sums[None]["loss"], rel=1e-6)
    assert sums["score"]["ce"] == pytest.approx(sums[None]["ce"], rel=1e-6)
    error, where = worst_relative_error(*(files / f"s{key}" / "gradients" for key in ("score", None)))
    assert error <= 1e-5, where


def test_a_run_reports_both_losses_and_resumes_with_its_key_alone(files, ranks):
    path, save = files / "weighted.jsonl", files / "saved"
    arguments = argv(files, "whole", "--valid-data-path", path, "--save", save)
    (result,) = run_main(ranks, [*arguments, "--exit-interval", "2"])
    assert result.exit_code == 0 and " weighted " in result.stdout, result.stderr
    (result,) = run_main(ranks, [*arguments, "--load", str(save)])
    assert result.exit_code == 0, result.stderr
    lines = read_metrics(files / "whole")
    first, last = lines[0], lines[-1]
    assert first["split"] == last["split"] == "valid" and sum("split" not in line for line in lines) == 4
    for line in lines:
        assert line["loss"] == line["weighted_ce_loss"] and 0 < line["ce_loss"] != line["loss"]
    assert last["loss"] < first["loss"] and last["ce_loss"] < first["ce_loss"]
    card = (files / "whole" / "loss_card.txt").read_text()
    assert "1 weighted CE, nats per token" in card and "w is score of the record" in card
    (result,) = run_main(ranks, argv(files, "other", "--load", save, key=None))
    assert reported_codes(result.stderr)[0].startswith("run-differs") and "loss.weight_key" in result.stderr


@pytest.mark.parametrize(
    "more, code",
    [
        (("--kd-ratio", 1, "--teacher-hf", "student"), "remove-flag: at kd-ratio 1 the loss has no cross"),
        (("--simpo-beta", 2), "exclude-each-other: a loss of pairs takes the place of the cross entropy"),
        (("--on-policy-fraction", 1), "exclude-each-other: records have weights"),
        (("--weight-key", "other"), "record-value-not-valid: it weighs the record in the loss"),
    ],
)
def test_what_excludes_weights_is_refused(more, code, files, ranks):
    more = tuple(files / one if one == "student" else one for one in more)
    (result,) = run_main(ranks, argv(files, "refused", *more, "--dry-run"))
    assert code in reported_codes(result.stderr), result.stderr
