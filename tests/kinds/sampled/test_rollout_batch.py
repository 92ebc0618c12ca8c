"""Check the composition of a step with completions of the student."""

from __future__ import annotations

import pytest

from mkd.kinds.sampled.rollout_batch import RolloutBatch
from tests.plan.shapes import config

ON = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--kd-ratio", 1)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ((), (8, 1, 0)),
        (("--samples-per-prompt", 4), (2, 4, 0)),
        (("--on-policy-fraction", 0.25), (2, 1, 6)),
        (("--on-policy-fraction", 0.01), (1, 1, 8)),
        (("--on-policy-fraction", 0.5, "--rollout-prompts", 3, "--samples-per-prompt", 2), (3, 2, 4)),
    ],
)
def test_rollouts_replace_packs(flags, expected):
    assert RolloutBatch.from_config(config(*ON, *flags), 8) == RolloutBatch(*expected)
