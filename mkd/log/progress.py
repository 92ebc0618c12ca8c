"""The lines of --log-format megatron: Megatron's training and validation lines, with mkd's fields added.

Scripts grep them, so they stay as they are. `compact.py` has the lines for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from mkd.log.compact import CompactLines, perplexity
from mkd.log.metrics import Metric

LONGEST_S = timedelta.max.days * 86400
LOSS_FIELDS = {  # label: key; `lm loss` is Megatron's name of the cross entropy, for scripts that grep it
    "loss": "loss",
    "lm loss": "ce_loss",
    "ce loss": "ce_loss",
    "kd loss": "kd_loss",
    "teacher ce": "teacher_ce",
}


class Lines(Protocol):
    """The lines of a run on the terminal."""

    def train(self, record: Mapping[str, float]) -> str:
        """Format a training record (`IntervalAverager.flush`)."""

    def valid(self, record: Mapping[str, float]) -> str:
        """Format an evaluation of held-out text."""


@dataclass(frozen=True)
class MegatronLines:
    """The lines of `--log-format megatron`."""

    train_iters: int
    global_batch_size: int  # packs
    more: Sequence[Metric] = ()  # metrics of features, which may have a field

    def train(self, record: Mapping[str, float]) -> str:
        sizes = dict[str, Any](train_iters=self.train_iters, global_batch_size=self.global_batch_size)
        return progress_line(record, more=self.more, **sizes)

    def valid(self, record: Mapping[str, float]) -> str:
        return evaluation_line(record, self.more)


def build_lines(
    log_format: str,
    train_iters: int,
    global_batch_size: int,
    more: Sequence[Metric] = (),  # metrics of features
) -> Lines:
    """Return the lines of --log-format."""
    if log_format == "compact":
        return CompactLines(train_iters, more)
    return MegatronLines(train_iters, global_batch_size, more)


def progress_line(
    record: Mapping[str, float],
    *,
    train_iters: int,
    global_batch_size: int,
    now: datetime | None = None,
    more: Sequence[Metric] = (),  # metrics of features
) -> str:
    """Format a training record (`IntervalAverager.flush`) as one line, in Megatron's spelling.

    Absent metrics are left out; zero, negative and non-finite values are shown. ETA counts training steps
    only. `global_batch_size` in packs; `now` is local time, the clock's by default.
    """
    iteration, step_time_ms = record["iteration"], record["step_time_ms"]
    fields = [
        f"iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {step_time_ms:.1f}",
        *_optional(record, "throughput per GPU (TFLOP/s/GPU)", "tflops_per_gpu", ".1f"),
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {global_batch_size:5d}",
        *(f"{label}: {value:.6E}" for label, value in _losses(record).items()),
        *_optional(record, "top-1 agreement", "top1_agreement", ".4f"),
        f"grad norm: {record['grad_norm']:.3f}",
        f"number of skipped iterations: {record.get('skipped_iterations', 0):3d}",
        f"number of nan iterations: {record.get('skipped_iterations', 0):3d}",  # the only reason to skip one
        *_of_features(record, more),
        *_optional(record, "loss spikes", "loss_spikes", "d"),
        *_optional(record, "teacher share", "teacher_share", ".3f"),
        *_optional(record, "tokens per second per GPU", "tokens_per_s_per_gpu", ".1f"),
        *_optional(record, "peak memory per GPU (GiB)", "peak_memory_gib", ".1f"),
        f"ETA: {timedelta(seconds=min(round((train_iters - iteration) * step_time_ms / 1000), LONGEST_S))}",
    ]
    return f" [{now or datetime.now():%Y-%m-%d %H:%M:%S}] " + " | ".join(fields) + " |"


def evaluation_line(record: Mapping[str, float], more: Sequence[Metric] = ()) -> str:
    """Format an evaluation record as Megatron does. Only cross entropy has a perplexity."""
    fields = [f"validation loss at iteration {record['iteration']}"]
    for label, value in _losses(record).items():
        fields.append(f"{label} value: {value:.6E}")
        if LOSS_FIELDS.get(label) == "ce_loss":
            fields.append(f"{label} PPL: {perplexity(value):.6E}")
    fields += _optional(record, "top-1 agreement value", "top1_agreement", ".4f")
    fields += _optional(record, "gap closed value", "gap_closed", ".4f")
    fields += _of_features(record, more, " value")
    return " " + " | ".join(fields) + " |"


def _losses(record: Mapping[str, float]) -> dict[str, float]:
    """Return loss values by label, then `kd loss/<teacher>` of each teacher if there are several."""
    losses = {label: record[key] for label, key in LOSS_FIELDS.items() if key in record}
    teachers = (key for key in record if key.startswith("kd_loss/"))
    return losses | {key.replace("_", " ", 1): record[key] for key in teachers}


def _of_features(record: Mapping[str, float], more: Sequence[Metric], after: str = "") -> list[str]:
    """Return the fields of features; each label is followed by `after`."""
    shown = [(one.line[0] + after, one.name, one.line[1]) for one in more if one.line]
    return [field for label, key, form in shown for field in _optional(record, label, key, form)]


def _optional(record: Mapping[str, float], label: str, key: str, form: str) -> list[str]:
    return [f"{label}: {record[key]:{form}}"] if key in record else []
