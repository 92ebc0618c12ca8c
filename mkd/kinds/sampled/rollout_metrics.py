"""The metrics of completions of the student."""

from __future__ import annotations

from mkd.log.metrics import STEP_MEAN, Metric

ROLLOUT_METRICS = (
    Metric(
        "rollout/length",
        "tokens",
        STEP_MEAN,
        "mean length of a completion. All rollout metrics are absent without rollouts",
        compact=("length", 4),
        line=("rollout length", ".1f"),
    ),
    Metric(
        "rollout/truncated",
        "proportion",
        STEP_MEAN,
        "fraction of completions without a stop token",
        line=("rollouts truncated", ".3f"),
    ),
    Metric(
        "rollout/repetition",
        "proportion",
        STEP_MEAN,
        "fraction of the sequences of 4 tokens that occurred before in their completion, averaged over "
        "completions of any length",
    ),
    Metric("rollout/entropy", "nats/token", STEP_MEAN, "entropy of the student where it sampled, at T = 1"),
    Metric(
        "rollout/teacher_nll",
        "nats/token",
        STEP_MEAN,
        "cross entropy of the teacher with the completions that have a loss; weighted mean of several "
        "teachers. Absent without such tokens",
        line=("rollout teacher nll", ".4f"),
    ),
    *(
        Metric(
            f"rollout/kl_quarter_{number}",
            "nats/token",
            STEP_MEAN,
            f"ln p - ln q of the sampled tokens in quarter {number} of completions with a loss, student p "
            "and teacher q: an estimate of the reverse KL at T = 1, if sampled at T = 1. Token j of n, "
            "counted from 0, is in quarter 1 + 4 j // n. Absent without such tokens",
        )
        for number in (1, 2, 3, 4)
    ),
    Metric(
        "rollout/coverage",
        "proportion",
        STEP_MEAN,
        "fraction of the sampled tokens on which a teacher with another tokenizer or a context is compared; "
        "the smallest of several teachers. Absent without one",
    ),
    Metric(
        "rollout/logp_gap",
        "nats/token",
        STEP_MEAN,
        "mean absolute difference of ln p of the sampled tokens between training and sampling: rounding. A "
        "larger one means that both do not run the same model. Absent without such tokens",
    ),
    Metric(
        "rollout/version_lag",
        "updates",
        STEP_MEAN,
        "mean number of updates since the weights that sampled a completion: 0, 1 of a server that samples "
        "ahead, up to --max-staleness of records",
    ),
    Metric(
        "rollout/stale",
        "records",
        STEP_MEAN,
        "records that were skipped with their group since the step before, because one is older than "
        "--max-staleness or of another run. Metrics of records are absent without --rollout-source records",
    ),
    Metric(
        "rollout/duplicate", "records", STEP_MEAN, "records that were skipped, with the id of an earlier one"
    ),
    Metric(
        "rollout/left_out",
        "records",
        STEP_MEAN,
        "records that were left out of their group: longer than --seq-length, or with the finish error",
    ),
    Metric("rollout/bad_records", "records", STEP_MEAN, "wrong records, which refused_records.jsonl lists"),
    Metric(
        "rollout/time_ms",
        "ms",
        STEP_MEAN,
        "wall-clock time of sampling, which step_time_ms leaves out",
        line=("rollout time (ms)", ".1f"),
    ),
)
