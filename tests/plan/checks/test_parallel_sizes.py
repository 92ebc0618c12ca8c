"""Check sizes out of range: which other problems they hide, and how large a size may be."""

from __future__ import annotations

import pytest

from tests.plan.checks.test_problems import codes, problem, problems, shape
from tests.reported import Reported


def test_a_size_out_of_range_hides_only_what_reads_it():
    batch = ["--micro-batch-size", "2", "--global-batch-size", "3"]
    out_of_range = "out-of-range: must be"
    found = codes(*batch, "--kd-ratio", "2.0", "--train-iters", "0")
    assert found == [out_of_range, "add-flag: train-iters is", "batch-not-divisible: is not divisible by"]
    assert codes(*batch, "--seq-length", "0", "--sequence-parallel") == [
        out_of_range,
        "batch-not-divisible: is not divisible by",
    ]
    assert codes("--micro-batch-size", "0", "--global-batch-size", "3") == [out_of_range]


@pytest.mark.parametrize(
    ("flag", "hidden"),
    [
        ("--seq-length", []),
        ("--micro-batch-size", ["world-not-divisible: cannot be divided into replicas"]),
        (
            "--pipeline-model-parallel-size",
            [
                "world-not-divisible: cannot be divided into replicas",
                "layers-not-divisible: layers do not divide over",
            ],
        ),
        (
            "--tensor-model-parallel-size",
            [
                "world-not-divisible: cannot be divided into replicas",
                "model-not-divisible: is not divisible by",
            ],
        ),
        ("--context-parallel-size", ["world-not-divisible: cannot be divided into replicas"]),
    ],
)
def test_layout_conflicts_are_seen_beside_a_size_out_of_range(flag, hidden):
    sizes = {"--tensor-model-parallel-size": "3", "--pipeline-model-parallel-size": "3", flag: "0"}
    argv = [word for pair in sizes.items() for word in pair]
    found = codes(*argv, world_size=4, student=shape(intermediate_size=64))
    others = {
        "world-not-divisible: cannot be divided into replicas",
        "layers-not-divisible: layers do not divide over",
        "model-not-divisible: is not divisible by",
    }
    assert sorted(found) == sorted({"out-of-range: must be", *others.difference(hidden)})


@pytest.mark.parametrize("flag", ["--seed", "--max-bad-records", "--eval-iters"])
def test_whole_numbers_stay_in_64_bits(flag):
    assert problems(flag, str(2**62)) == []
    error = problem(flag, str(2**64))
    assert error.code == "out-of-range" and error.what.endswith("2^62") and flag in error.do


def test_a_run_may_have_a_trillion_steps():
    assert problems("--train-iters", str(10**12)) == []
    assert Reported.of(problem("--train-iters", str(10**12 + 1))) == "out-of-range: must be"


def test_tokens_of_a_micro_batch_are_counted_in_32_bits():
    assert codes("--seq-length", str(2**30), "--micro-batch-size", "2") == [
        "numbers-contradict: tokens are too many"
    ]
    assert problems("--seq-length", str(2**30)) == []


def test_accepted_changes_need_a_run_to_resume():
    assert codes("--accept-change", "data") == ["remove-flag: no effect"]
    assert problems("--accept-change", "data", "--load", "runs/a") == []


def test_the_tensor_parallel_size_that_is_named_fits_all_models_and_processes():
    models = dict(student=shape(intermediate_size=90), teacher=shape(intermediate_size=66))
    student, teacher = (
        error.do for error in problems("--tensor-model-parallel-size", "4", world_size=4, **models)
    )
    assert student == teacher  # 3 divides both widths, but not 4 processes
    assert student.endswith("--tensor-model-parallel-size 2")
