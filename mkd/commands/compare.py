"""Compare two runs by their metrics, or two models by their predictions of a text.

    mkd compare runs/a runs/b
    mkd compare runs/a runs/b --eps 0      # the same bits?
    mkd compare TEACHER STUDENT --data held_out.jsonl

With --data, A and B are Hugging Face folders or hub ids. transformers runs both, on a GPU if there is one.
The result is KL, top-1 agreement, cross entropy and perplexity over the text's loss tokens.

A run is its log folder or its metrics.jsonl. Only steps that both runs have are compared. Two values differ
if |a - b| > eps * max(|a|, |b|), or if one of them is null (not finite, or not measured). Times and memory
are shown but never count as a difference. The exit code is 0 if nothing differs, 1 otherwise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mkd.commands.compare_models import add_model_flags, compare_two_models, refuse_model_flags
from mkd.config.flags import FlagParser
from mkd.errors import EXIT_DONE, DataError, UsageError, returns_exit_code
from mkd.human import counted
from mkd.kinds.known_kinds import METRICS
from mkd.log.metrics import Reduction
from mkd.log.records import read_records, split_of

COUNTERS = ("iteration", "split")
OF_THE_MACHINE = {
    "step_time_ms",
    "peak_memory_gib",
    *(metric.name for metric in METRICS.metrics if metric.reduction is Reduction.TIME_MEAN),
}
HIGHER_IS_BETTER = ("top1_agreement", "tokens_per_s_per_gpu", "tflops_per_gpu", "accuracy", "accuracy_norm")
HAS_BEST = (
    "loss",
    "ce_loss",
    "kd_loss",
    "perplexity",
    "ce",
    "bits_per_byte",
    "step_time_ms",
    *HIGHER_IS_BETTER,
)


@dataclass(frozen=True)
class Comparison:
    """One key of one split, over the steps that both runs have."""

    split: str
    key: str
    final: tuple[float, float]
    best: tuple[float, float] | None  # None if neither higher nor lower is better
    first_difference: int | None  # iteration
    largest_difference: float  # |a - b| / max(|a|, |b|)

    @property
    def counts(self) -> bool:
        return self.key not in OF_THE_MACHINE

    def cells(self) -> tuple[str, ...]:
        final, best = (
            ["", ""] if pair is None else [f"{value:.7g}" for value in pair]
            for pair in (self.final, self.best)
        )
        parts = "never" if self.first_difference is None else str(self.first_difference)
        gap = f"{self.final[1] - self.final[0]:+.3g}"
        return (
            self.split,
            self.key,
            *final,
            gap,
            *best,
            f"{self.largest_difference:.2g}",
            parts if self.counts else "-",
        )


HEAD = ("split", "key", "final A", "final B", "B - A", "best A", "best B", "max rel", "parts at")


def compare(a: list[dict[str, Any]], b: list[dict[str, Any]], eps: float) -> Iterator[Comparison]:
    """Yield comparisons in the order of the first run's records, without keys that one run lacks."""
    for split, key in dict.fromkeys(
        (split_of(record), key) for record in a for key in record if key not in COUNTERS
    ):
        ours, theirs = values_of(a, split, key), values_of(b, split, key)
        steps = sorted(ours.keys() & theirs.keys())
        if any(math.isfinite(run[step]) for run in (ours, theirs) for step in steps):
            gaps = [relative(ours[step], theirs[step]) for step in steps]
            yield Comparison(
                split=split,
                key=key,
                final=(ours[steps[-1]], theirs[steps[-1]]),
                best=best(key, [ours[step] for step in steps], [theirs[step] for step in steps]),
                first_difference=next(
                    (step for step, gap in zip(steps, gaps, strict=True) if gap > eps), None
                ),
                largest_difference=max(gaps),
            )


def values_of(records: list[dict[str, Any]], split: str, key: str) -> dict[int, float]:
    """Return iteration -> value, with NaN for null."""
    found = {
        record["iteration"]: record[key] for record in records if split_of(record) == split and key in record
    }
    return {
        step: math.nan if v is None else v
        for step, v in found.items()
        if v is None or isinstance(v, (int, float))
    }


def relative(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|): 0 if both are 0 or both NaN, infinity if only one is NaN."""
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def best(key: str, a: list[float], b: list[float]) -> tuple[float, float] | None:
    """Return the best value of each run, or None if the key has no direction.

    The name that decides the direction is the end of a task's key, and the beginning of a teacher's.
    """
    names = {key, key.partition("/")[0], key.rpartition("/")[2]}
    if not names & set(HAS_BEST):
        return None
    choose = max if names & set(HIGHER_IS_BETTER) else min
    ours, theirs = (
        choose((value for value in values if not math.isnan(value)), default=math.nan) for values in (a, b)
    )
    return ours, theirs


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if place > 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def run(args: argparse.Namespace) -> int:
    a, b = read_records(args.a), read_records(args.b)
    found = list(compare(a, b, args.eps))
    if args.keys:
        _check_keys(args.keys, [*a, *b])
        found = [one for one in found if one.key in args.keys]
    if not found:
        of_keys = f" of {', '.join(args.keys)}" if args.keys else ""
        raise DataError(
            f"{args.a} and {args.b} have no figure{of_keys} of the same step",
            "",
            "compare runs that overlap",
            code="metrics-empty",
        )
    print(f"A {args.a}: {counted(last_step(a), 'step')}\nB {args.b}: {counted(last_step(b), 'step')}")
    if last_step(a) != last_step(b):
        print(f"compared up to iteration {min(last_step(a), last_step(b))}, where the shorter run ends")
    print(table([HEAD, *(one.cells() for one in found)]))
    parted = [one for one in found if one.counts and one.first_difference is not None]
    if not parted:
        print(f"no value that counts differs by more than {args.eps:g}, relative to its size")
        return EXIT_DONE
    first = min(parted, key=lambda one: one.first_difference or 0)
    place = f"{first.split} {first.key} at iteration {first.first_difference}"
    print(f"first difference above {args.eps:g}: {place}")
    return 1


def _check_keys(keys: Sequence[str], records: list[dict[str, Any]]) -> None:
    present = dict.fromkeys(key for record in records for key in record if key not in COUNTERS)
    missing = [key for key in keys if key not in present]
    if missing and records:
        raise UsageError(
            f"no record has {', '.join(missing)}",
            "",
            f"name some of {', '.join(present)} with --keys",
            code="value-unknown",
        )


def relative_difference(text: str) -> float:
    """Parse a flag's value, as argparse's `type`: a finite number of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of 0 or more")
    return number


def last_step(records: list[dict[str, Any]]) -> int:
    return max((record["iteration"] for record in records), default=0)


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    parser = FlagParser("mkd compare", __doc__)
    parser.add_argument(
        "a", metavar="A", help="log folder of a run, or its metrics.jsonl; with --data a model"
    )
    parser.add_argument("b", metavar="B", help="the other run or model")
    of_runs = parser.add_argument_group("runs")
    of_runs.add_argument(
        "--eps", type=relative_difference, help="largest relative difference to ignore (default: 1e-6)"
    )
    of_runs.add_argument(
        "--keys", nargs="+", metavar="KEY", help="keys to compare (default: all that both runs have)"
    )
    add_model_flags(parser)
    args = parser.parse_args(argv)
    if args.data:
        return compare_two_models(args)
    refuse_model_flags(args)
    args.eps = 1e-6 if args.eps is None else args.eps
    return run(args)
