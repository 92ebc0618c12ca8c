"""Check that context parallelism changes nothing: records, evaluation, the exported student."""

from __future__ import annotations

import pytest

from tests.train.command import flags, make_files, read_metrics, read_weights, run_main

CP2 = ("--context-parallel-size", 2)
VALUES = ("loss", "ce_loss", "kd_loss", "teacher_ce", "teacher_entropy", "top1_agreement", "num_loss_tokens")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("context_parallel"))


def metrics(files, ranks, run, world_size, *more):
    """Return records of a run that evaluates all held-out documents before the first step and at the end."""
    evaluation = ("--split", "80,20,0", "--eval-interval", 2, "--eval-iters", 100)
    argv = flags(files, run, *evaluation, *more, "--export-hf", files / f"{run} hf")
    results = run_main(ranks, argv, world_size)
    assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
    return read_metrics(files / run)


def assert_same(line, expected, names=VALUES):
    assert (line["iteration"], line.get("split")) == (expected["iteration"], expected.get("split"))
    for name in names:
        assert line[name] == pytest.approx(expected[name], rel=1e-5), (line["iteration"], name)


def test_training_is_the_same(files, ranks):
    """With one document per pack both runs have the same packs: all records and exported weights agree."""
    one = metrics(files, ranks, "one", 1, "--pack", "none")
    two = metrics(files, ranks, "two", 2, "--pack", "none", *CP2)
    assert len(one) == len(two) == 4
    for line, expected in zip(two, one, strict=True):
        assert_same(line, expected, VALUES if "split" in line else (*VALUES, "grad_norm", "learning_rate"))
        assert line["consumed_tokens"] == expected["consumed_tokens"]
    ours, theirs, before = (read_weights(files / name) for name in ("two hf", "one hf", "student"))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (weight != before[name]).any()
        assert (ours[name] - weight).norm() <= 1e-4 * weight.norm(), name


def test_evaluation_does_not_depend_on_how_documents_are_padded_and_packed(files, ranks):
    """With several documents per pack only CP2 pads them to 4 tokens: other packs, the same loss."""
    one, two = (
        metrics(files, ranks, f"packed {size}", size, "--context-parallel-size", size)[0] for size in (1, 2)
    )
    assert one["split"] == "valid" and one["iteration"] == 0
    assert_same(two, one)
