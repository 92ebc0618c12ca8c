"""The registry of metrics: every key of metrics.jsonl, its unit, and its reduction over a log interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """Way that the steps of a log interval become one value."""

    TOKEN_MEAN = "sum over loss tokens, divided once by the interval's num_loss_tokens"
    ROW_MEAN = "sum over each teacher's rows, divided once by the rows of the interval"
    STEP_MEAN = "mean over steps"
    TIME_MEAN = "mean over steps, weighted by step_time_ms"
    SUM = "sum over steps"
    LAST = "value of the last step"


@dataclass(frozen=True)
class Metric:
    """One key of a metrics record."""

    name: str
    unit: str
    reduction: Reduction
    help: str
    number: type = float


TOKEN_MEAN, ROW_MEAN, STEP_MEAN, TIME_MEAN, SUM, LAST = Reduction

METRICS = (
    Metric("iteration", "steps", LAST, "optimizer steps since the start of training", int),
    Metric("consumed_samples", "packs", LAST, "packs trained on so far", int),
    Metric("consumed_tokens", "tokens", LAST, "tokens in these packs, padding included", int),
    Metric(
        "loss",
        "nats",
        ROW_MEAN,
        "(1 - kd_ratio) * ce_loss + kd_ratio * kd_loss + auxiliary losses; held-out records leave the last "
        "out. With judged answers, feedback_loss takes the place of ce_loss",
    ),
    Metric("ce_loss", "nats/token", TOKEN_MEAN, "cross entropy of the student on the data"),
    Metric(
        "kd_loss",
        "nats/row",
        ROW_MEAN,
        "divergence from the teacher, temperature scaling included. A row is a loss token, or an aligned "
        "chunk of a cross-tokenizer teacher. With several teachers: the sum of teacher_weight * kd_loss",
    ),
    Metric(
        "teacher_ce",
        "nats/token",
        ROW_MEAN,
        "cross entropy of the teacher with the data, per token of its own tokenizer",
    ),
    Metric(
        "teacher_entropy",
        "nats/token",
        ROW_MEAN,
        "entropy of the teacher's distribution, per token of its own tokenizer",
    ),
    Metric(
        "top1_agreement",
        "proportion",
        ROW_MEAN,
        "fraction of rows where both models rank the same id first. Of aligned chunks, only one-to-one pairs "
        "are compared",
    ),
    Metric("grad_norm", "1", LAST, "L2 norm of the student's gradient before clipping"),
    Metric("learning_rate", "1", LAST, "learning rate of the last step, even if it made no update"),
    Metric("num_loss_tokens", "tokens", SUM, "loss tokens; the weight of this line's token means", int),
    Metric("step_time_ms", "ms", STEP_MEAN, "wall-clock time of one optimizer step"),
    Metric(
        "tokens_per_s_per_gpu",
        "tokens/s",
        TIME_MEAN,
        "tokens trained on per second and device, padding included",
    ),
    Metric("tflops_per_gpu", "TFLOP/s", TIME_MEAN, "model FLOPs per second and device, teachers included"),
    Metric(
        "skipped_iterations",
        "steps",
        SUM,
        "steps without an update, or without one of several, because loss or gradient was not finite",
        int,
    ),
    Metric(
        "teacher_share",
        "proportion",
        TIME_MEAN,
        "fraction of the step time that the teachers' layers take on the first device",
    ),
    Metric(
        "expert_load_max_over_mean",
        "1",
        STEP_MEAN,
        "tokens of the busiest expert divided by the mean over experts, in the global batch without padding, "
        "averaged over layers. 1 is even; absent without experts",
    ),
    Metric(
        "expert_load_worst_layer",
        "1",
        STEP_MEAN,
        "expert_load_max_over_mean of the layer where it is largest, instead of the average over layers",
    ),
    Metric("loss_spikes", "steps", SUM, "steps whose loss stands out; absent if there are none", int),
    Metric(
        "gap_closed",
        "proportion",
        LAST,
        "fraction of the initial held-out kd_loss removed so far. Absent if the loss, the teachers or the "
        "held-out set have changed since",
    ),
    Metric("consumed_prompts", "prompts", LAST, "prompts that the student has completed so far", int),
    Metric(
        "rollout/length",
        "tokens",
        STEP_MEAN,
        "mean length of a completion. All rollout metrics are absent without rollouts",
    ),
    Metric("rollout/truncated", "proportion", STEP_MEAN, "fraction of completions without a stop token"),
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
        "fraction of the sampled tokens on which a cross-tokenizer teacher is compared; the smallest of "
        "several teachers. Absent without one",
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
        "mean number of updates since the weights that sampled a completion, 0 or 1",
    ),
    Metric("rollout/time_ms", "ms", STEP_MEAN, "wall-clock time of sampling, which step_time_ms leaves out"),
    Metric(
        "feedback_loss",
        "nats",
        ROW_MEAN,
        "loss of judged answers, a mean over pairs or over sampled tokens, without auxiliary losses. Absent "
        "without judged answers",
    ),
    Metric(
        "dpo/margin",
        "nats",
        ROW_MEAN,
        "mean over pairs of z = beta x (log-ratio of the chosen - log-ratio of the rejected answer), each of "
        "student to reference. DPO's metrics are absent without --dpo-beta",
    ),
    Metric("dpo/accuracy", "proportion", ROW_MEAN, "fraction of pairs whose margin is above 0"),
    Metric(
        "reward/mean",
        "1",
        STEP_MEAN,
        "mean reward of the completions; steps without any reward do not count. Metrics of rewards are "
        "absent without --reward",
    ),
    Metric(
        "reward/std0_groups",
        "proportion",
        STEP_MEAN,
        "fraction of prompts whose rewards are all the same, so that they teach nothing; prompts and steps "
        "without any reward do not count",
    ),
    Metric("reward/failed", "completions", STEP_MEAN, "completions of a step whose reward failed"),
    Metric(
        "reward/clipped",
        "proportion",
        ROW_MEAN,
        "fraction of sampled tokens whose ratio is clipped, in the last update of each iteration",
    ),
    Metric("peak_memory_gib", "GiB", LAST, "peak memory allocated by torch on any GPU since the start"),
)

PER_TEACHER = (  # keys end in a slash and the teacher's name
    Metric(
        "teacher_weight",
        "proportion",
        ROW_MEAN,
        "weight of this teacher among several, averaged over its rows",
    ),
    Metric(
        "num_aligned",
        "rows/step",
        STEP_MEAN,
        "units in which the teacher and the student are compared: loss tokens, or aligned chunks",
    ),
)

AUXILIARY = Metric(  # always followed by a slash and the name of the loss
    "auxiliary_loss",
    "nats/token",
    TOKEN_MEAN,
    "auxiliary loss that the student's layers add, coefficient included: in each step a mean over all tokens "
    "of the global batch except padding. The record weighs steps by their loss tokens",
)

_BY_NAME = {metric.name: metric for metric in (*METRICS, *PER_TEACHER, AUXILIARY)}
_SUMMED = (TOKEN_MEAN, ROW_MEAN)
_ORDER = {name: place for place, name in enumerate(_BY_NAME)}


def find_metric(key: str) -> Metric:
    """Return the registry entry of `key`, of `kd_loss` for `kd_loss/<teacher>`. Raises KeyError."""
    return _BY_NAME.get(key) or _BY_NAME[key.partition("/")[0]]


class IntervalAverager:
    """Collect the steps of one log interval, or the batches of one evaluation, into one record.

    Token means are sums over sums: each step weighs as many loss tokens as it has. Lines weighted by their
    num_loss_tokens therefore average exactly. Means over other rows do not add up like this: the reporter
    adds up the sums of the interval first (see mkd/train/report.py). Nothing is clamped: negative and
    non-finite values stay. A metric that no step reported is absent from the record.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(
        self,
        token_sums: Mapping[str, float],
        row_sums: Mapping[str, tuple[float, float]] | None = None,
        **values: float,
    ) -> None:
        """Add one step.

        `token_sums`: sums over the step's loss tokens, including `num_loss_tokens`. `row_sums`: (sum, rows)
        of metrics of single teachers, which are means over that teacher's rows. `values`: this step's metrics
        of the other reductions; means over time need `step_time_ms` with them.
        """
        for key, total in token_sums.items():
            if key != "num_loss_tokens":
                assert find_metric(key).reduction in _SUMMED, f"{key} is not a token mean"
                self._accumulate(key, total, token_sums["num_loss_tokens"])
        self._sum("num_loss_tokens", token_sums["num_loss_tokens"])
        for key, (total, rows) in (row_sums or {}).items():
            self._accumulate(key, total, rows)
        for key, value in values.items():
            match find_metric(key).reduction:
                case Reduction.STEP_MEAN:
                    self._accumulate(key, value, 1)
                case Reduction.TIME_MEAN:
                    self._accumulate(key, value * values["step_time_ms"], values["step_time_ms"])
                case Reduction.SUM:
                    self._sum(key, value)
                case Reduction.LAST:
                    self._totals[key], self._weights[key] = value, 1
                case Reduction.TOKEN_MEAN | Reduction.ROW_MEAN:
                    raise AssertionError(f"{key} is a token mean: pass its sum in token_sums")

    @property
    def state(self) -> dict[str, tuple[float, float]]:
        """Metric -> (total, weight) of everything added since the last record, as JSON values."""
        return {key: (total, self._weights[key]) for key, total in self._totals.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from the `state` of another averager."""
        self._totals = {key: total for key, (total, _) in state.items()}
        self._weights = {key: weight for key, (_, weight) in state.items()}

    def flush(self) -> dict[str, int | float]:
        """Return the interval's record in registry order, and start afresh. Means over 0 tokens are NaN."""
        keys = sorted(self._totals, key=lambda key: (_ORDER[find_metric(key).name], key))
        record = {key: _typed(find_metric(key), self._mean(key)) for key in keys}
        self._totals, self._weights = {}, {}
        return record

    def _accumulate(self, key: str, total: float, weight: float) -> None:
        self._totals[key] = self._totals.get(key, 0) + total
        self._weights[key] = self._weights.get(key, 0) + weight

    def _sum(self, key: str, value: float) -> None:
        self._totals[key], self._weights[key] = self._totals.get(key, 0) + value, 1

    def _mean(self, key: str) -> float:
        return self._totals[key] / self._weights[key] if self._weights[key] else math.nan


def _typed(metric: Metric, value: float) -> int | float:
    """Convert `value` to the metric's number type; NaN and infinity stay floats."""
    return metric.number(value) if math.isfinite(value) else float(value)
