"""Check which runs may have teacher forwards ahead of the student."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.prefetch_limits import states_ahead
from tests.reported import reports
from tests.run_facts import problems_of

BASE = "--student-hf s --teacher-hf t --data-path d --train-iters 10 --seq-length 64 --global-batch-size 8"
PP4, VPP = "--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        (f"{PP4} --teacher-prefetch 3", []),
        (f"{PP4} --teacher-prefetch auto", []),
        ("--teacher-prefetch 0", []),
        (f"{PP4} --teacher-prefetch 0 --kd-ratio 0", []),
        (f"{PP4} --teacher-prefetch -1", ["value-not-valid: is no such number"]),
        (f"{PP4} --teacher-prefetch some", ["value-not-valid: is no such number"]),
        (f"{PP4} --teacher-prefetch 1.5", ["value-not-valid: is no such number"]),
        ("--teacher-prefetch 1", ["teacher-prefetch-not-possible: but --pipeline-model-parallel-size"]),
        ("--teacher-prefetch auto", []),
        (f"{PP4} {VPP} --teacher-prefetch auto", []),
        ("--pipeline-model-parallel-size 0 --teacher-prefetch 1", ["out-of-range: must be"]),
        (
            f"{PP4} {VPP} --teacher-prefetch 1",
            ["teacher-prefetch-not-possible: with virtual pipeline stages"],
        ),
        (f"{PP4} --teacher-prefetch 1 --kd-ratio 0", []),
        (
            f"{PP4} --teacher-prefetch 1 --teacher-topk k",
            ["teacher-prefetch-not-possible: but no teacher runs"],
        ),
    ],
)
def test_codes_of_a_run(argv, codes):
    assert reports(problems_of(load_config(f"{BASE} {argv}".split()).config, 4)) == codes


@pytest.mark.parametrize(
    ("argv", "ahead"),
    [
        (PP4, 8),
        (f"{PP4} --teacher-prefetch auto", 8),
        (f"{PP4} --kd-ratio 0 --dpo-beta 0.1", 8),
        (f"{PP4} --teacher-prefetch 3", 3),
        (f"{PP4} --teacher-prefetch 0", 0),
        ("", 0),
        (f"{PP4} {VPP}", 0),
        (f"{PP4} --num-layers-per-virtual-pipeline-stage 1", 0),
        (f"{PP4} --kd-ratio 0", 0),
        (f"{PP4} --teacher-topk k", 0),
        (f"{PP4} --on-policy-fraction 1", 0),
    ],
)
def test_auto_is_the_default_and_twice_the_pipeline_where_teachers_can_be_ahead(argv, ahead):
    assert states_ahead(load_config(f"{BASE} {argv}".split()).config) == ahead
