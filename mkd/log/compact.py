"""One short line per log step, for people; metrics.jsonl has every number.

Columns keep their widths, so that lines stand below each other. A line has at most 110 columns in runs of
up to 9,999 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mkd.human import count, duration, fixed, scientific
from mkd.log.metrics import Metric

Record = Mapping[str, float]

COLUMNS = {  # key: (label, columns); those that a run does not have are left out
    "loss": ("loss", 5),
    "kd_loss": ("kd", 6),
    "ce_loss": ("ce", 5),
    "top1_agreement": ("top1", 5),
}
ONLY_HELD_OUT = {"teacher_ce": ("teacher ce", 5), "gap_closed": ("gap closed", 6)}
SAMPLED = ("reward/mean", "rollout/length")
"""Keys of runs that sample. Their lines have no other room for these than that of `LEFT_OUT`."""

LEFT_OUT = ("ce_loss", "top1_agreement")
APART = "teacher_idle_share"
"""Key of runs whose teachers have processes of their own. It takes the room of `top1_agreement`."""


@dataclass(frozen=True)
class CompactLines:
    """The lines of `--log-format compact`."""

    train_iters: int
    more: Sequence[Metric] = ()  # metrics of features, which may have columns

    @property
    def columns(self) -> dict[str, tuple[str, int]]:
        """Key -> (label, columns)."""
        more = {one.name: one.compact for one in self.more if one.compact}
        return COLUMNS | more

    def train(self, record: Record) -> str:
        """Format a training record. Time left counts training steps only."""
        is_sampled = any(key in record for key in SAMPLED)
        left_out = LEFT_OUT if is_sampled else LEFT_OUT[1:] if APART in record else ()
        shown = {key: of for key, of in self.columns.items() if key not in left_out}
        step_ms = record["step_time_ms"]
        left_s = (self.train_iters - record["iteration"]) * step_ms / 1000
        fields = [
            self._place(record),
            *_columns(record, shown),
            f"lr {scientific(record['learning_rate'])}",
            f"norm {fixed(record['grad_norm'], 4)}",
            f"{duration(step_ms / 1000):>6}",
            f"{count(record['tokens_per_s_per_gpu']):>4} tok/s",
            f"eta {duration(left_s):>6}",
        ]
        if record.get("skipped_iterations"):
            fields.append(f"skipped {record['skipped_iterations']:.0f}")
        if record.get("loss_spikes"):
            fields.append(f"spikes {record['loss_spikes']:.0f}")
        return "  ".join(fields)

    def valid(self, record: Record) -> str:
        """Format an evaluation of held-out text. Only cross entropy has a perplexity."""
        fields = [self._place(record), *_columns(record, self.columns | ONLY_HELD_OUT)]
        if "ce_loss" in record:
            fields.append(f"ppl {fixed(perplexity(record['ce_loss']), 5).strip()}")
        return "  ".join([*fields, "held-out"])

    def _place(self, record: Record) -> str:
        return f" {record['iteration']:{len(str(self.train_iters))}d}/{self.train_iters}"


def _columns(record: Record, columns: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    for key, (label, width) in columns.items():
        if key in record:
            yield f"{label} {fixed(record[key], width)}"


def perplexity(cross_entropy: float) -> float:
    """Return exp(cross entropy), infinite for a model that has diverged."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
