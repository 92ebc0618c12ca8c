"""The registry of metrics: every key of metrics.jsonl, its unit, and its reduction over a log interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    compact: tuple[str, int] | None = None  # label and columns in the short lines for people
    line: tuple[str, str] | None = None  # label and format in Megatron's long lines


TOKEN_MEAN, ROW_MEAN, STEP_MEAN, TIME_MEAN, SUM, LAST = Reduction

CORE_METRICS = (
    Metric("iteration", "steps", LAST, "optimizer steps since the start of training", int),
    Metric("consumed_samples", "packs", LAST, "packs trained on so far", int),
    Metric("consumed_tokens", "tokens", LAST, "tokens in these packs, padding included", int),
    Metric(
        "loss",
        "nats",
        ROW_MEAN,
        "(1 - kd_ratio) * ce_loss + kd_ratio * kd_loss + auxiliary losses; held-out records leave the last "
        "out. A run with another loss on the data, such as feedback_loss, has it in place of ce_loss",
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
        "feedback_loss",
        "nats",
        ROW_MEAN,
        "loss of judged answers, a mean over pairs or over sampled tokens, without auxiliary losses. Absent "
        "without judged answers",
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

PER_TAG = (  # keys end in a slash and the tag
    Metric("tokens", "tokens", SUM, "loss tokens of the records of this tag", int),
    Metric("ce", "nats/token", ROW_MEAN, "ce_loss on the records of this tag. Absent with --weight-key"),
)

AUXILIARY = Metric(  # always followed by a slash and the name of the loss
    "auxiliary_loss",
    "nats/token",
    TOKEN_MEAN,
    "auxiliary loss that the student's layers add, coefficient included: in each step a mean over all tokens "
    "of the global batch except padding. The record weighs steps by their loss tokens",
)

_SUMMED = (TOKEN_MEAN, ROW_MEAN)


class Registry:
    """All metrics of a run, in the order of its records."""

    def __init__(self, metrics: Sequence[Metric]):
        self.metrics = tuple(metrics)  # those with a key of their own
        self._by_name = {metric.name: metric for metric in (*metrics, *PER_TEACHER, *PER_TAG, AUXILIARY)}
        self._order = {name: place for place, name in enumerate(self._by_name)}

    def find(self, key: str) -> Metric:
        """Return the entry of `key`, of `kd_loss` for `kd_loss/<teacher>`. Raises KeyError."""
        parts = key.split("/")
        names = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
        return self._by_name[next((name for name in names if name in self._by_name), key)]

    def in_order(self, keys: Iterable[str]) -> list[str]:
        """Return the keys in the order of records."""
        return sorted(keys, key=lambda key: (self._order[self.find(key).name], key))


class IntervalAverager:
    """Collect the steps of one log interval, or the batches of one evaluation, into one record.

    Token means are sums over sums: each step weighs as many loss tokens as it has. Lines weighted by their
    num_loss_tokens therefore average exactly. Means over other rows do not add up like this: the reporter
    adds up the sums of the interval first (see mkd/train/report.py). Nothing is clamped: negative and
    non-finite values stay. A metric that no step reported is absent from the record.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
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
                assert self._registry.find(key).reduction in _SUMMED, f"{key} is not a token mean"
                self._accumulate(key, total, token_sums["num_loss_tokens"])
        self._sum("num_loss_tokens", token_sums["num_loss_tokens"])
        for key, (total, rows) in (row_sums or {}).items():
            self._accumulate(key, total, rows)
        for key, value in values.items():
            match self._registry.find(key).reduction:
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
        keys = self._registry.in_order(self._totals)
        record = {key: _typed(self._registry.find(key), self._mean(key)) for key in keys}
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
