"""Check which runs may have teacher forwards ahead of the student."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.problems import find_problems

BASE = "--student-hf s --teacher-hf t --data-path d --train-iters 10 --seq-length 64 --global-batch-size 8"
PP4, VPP = "--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        (f"{PP4} --teacher-prefetch 3", []),
        (f"{PP4} --teacher-prefetch auto", []),
        ("--teacher-prefetch 0", []),
        (f"{PP4} --teacher-prefetch 0 --kd-ratio 0", []),
        (f"{PP4} --teacher-prefetch -1", ["teacher-prefetch-not-valid"]),
        (f"{PP4} --teacher-prefetch some", ["teacher-prefetch-not-valid"]),
        (f"{PP4} --teacher-prefetch 1.5", ["teacher-prefetch-not-valid"]),
        ("--teacher-prefetch auto", ["teacher-prefetch-without-pipeline"]),
        ("--pipeline-model-parallel-size 0 --teacher-prefetch 1", ["value-out-of-range"]),
        (f"{PP4} {VPP} --teacher-prefetch 1", ["teacher-prefetch-with-interleaving"]),
        (f"{PP4} --teacher-prefetch 1 --kd-ratio 0", ["teacher-prefetch-without-teacher"]),
        (f"{PP4} --teacher-prefetch 1 --teacher-topk k", ["teacher-prefetch-without-teacher"]),
    ],
)
def test_codes_of_a_run(argv, codes):
    assert [error.code for error in find_problems(load_config(f"{BASE} {argv}".split()).config, 4)] == codes


def test_auto_is_twice_the_pipeline():
    assert load_config(f"{BASE} {PP4} --teacher-prefetch auto".split()).config.parallel.states_ahead == 8
