"""Sizes and numbers that cannot be: what they hide of the other problems, and how large they may be."""

from __future__ import annotations

import pytest

from tests.plan.checks.test_problems import problem, problems, shape


def test_a_size_out_of_range_hides_only_what_reads_it():
    batch = ["--micro-batch-size", "2", "--global-batch-size", "3"]
    of_batch = "global-batch-size 3 is not divisible by micro-batch-size 2"
    whats = [error.what for error in problems(*batch, "--kd-ratio", "2.0", "--train-iters", "0")]
    assert len(whats) == 3 and whats[-1].startswith(of_batch)
    size, other = problems(*batch, "--seq-length", "0", "--sequence-parallel")
    assert size.what == "seq-length 0 must be 1 or more" and other.what.startswith(of_batch)
    (error,) = problems("--micro-batch-size", "0", "--global-batch-size", "3")
    assert error.what == "micro-batch-size 0 must be 1 or more"


@pytest.mark.parametrize(
    ("flag", "hidden"),
    [
        ("--seq-length", []),
        ("--micro-batch-size", ["processes"]),
        ("--pipeline-model-parallel-size", ["processes", "layers"]),
        ("--tensor-model-parallel-size", ["processes", "ffn"]),
        ("--context-parallel-size", ["processes"]),
    ],
)
def test_layout_conflicts_are_seen_beside_a_size_out_of_range(flag, hidden):
    sizes = {"--tensor-model-parallel-size": "3", "--pipeline-model-parallel-size": "3", flag: "0"}
    argv = [word for pair in sizes.items() for word in pair]
    found = [error.what for error in problems(*argv, world_size=4, student=shape(intermediate_size=64))]
    assert f"{flag[2:]} 0 must be 1 or more" in found
    for name, text in (
        ("processes", "4 processes do not"),
        ("layers", "student: 8 layers"),
        ("ffn", "hidden_size 64 is"),
    ):
        assert any(text in what for what in found) == (name not in hidden), (name, found)


@pytest.mark.parametrize("flag", ["--seed", "--max-bad-records", "--eval-iters"])
def test_whole_numbers_stay_in_64_bits(flag):
    assert problems(flag, str(2**62)) == []
    (error,) = problems(flag, str(2**64))
    assert error.what.endswith("must be at most 2^62") and error.do == f"change {flag}"


def test_a_run_may_have_a_trillion_steps():
    assert problems("--train-iters", str(10**12)) == []
    assert problem("--train-iters", str(10**12 + 1)).what.endswith("must be at most a trillion")


def test_tokens_of_a_micro_batch_are_counted_in_32_bits():
    (error,) = problems("--seq-length", str(2**30), "--micro-batch-size", "2")
    assert error.what.endswith("2147483648 tokens are too many")
    assert problems("--seq-length", str(2**30)) == []


def test_accepted_changes_need_a_run_to_go_on_from():
    assert problem("--accept-change", "data").what == "accept-change would have no effect"
    assert problems("--accept-change", "data", "--load", "runs/a") == []


def test_the_tensor_parallel_size_that_is_named_fits_all_models_and_processes():
    models = dict(student=shape(intermediate_size=90), teacher=shape(intermediate_size=66))
    student, teacher = (
        error.do for error in problems("--tensor-model-parallel-size", "4", world_size=4, **models)
    )
    assert (
        student == teacher == "use --tensor-model-parallel-size 2"
    )  # 3 divides both widths, but not 4 processes
