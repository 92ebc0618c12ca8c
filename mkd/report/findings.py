"""Compare: every evaluation before and after, planned and measured figures, settings between runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mkd.config.load import DEFAULT
from mkd.kinds.known_kinds import METRICS
from mkd.log.records import TRAIN
from mkd.report.columns import NOT_DRAWN, Split
from mkd.report.run_folder import RunFolder
from mkd.report.waiting_sides import sides_advice

HIGHER_IS_BETTER = frozenset({"top1_agreement", "gap_closed", "accuracy", "accuracy_norm"})
LOWER_IS_BETTER = frozenset({"loss", "ce_loss", "kd_loss", "ce", "perplexity", "bits_per_byte"})
COUNTS = frozenset({"num_loss_tokens", "num_questions", "num_completions", "num_tokens", "num_bytes"})
NO_TEACHER_KEYS = frozenset({"teacher_ce", "teacher_entropy", "teacher_weight", "num_aligned"})
"""Metrics of evaluations that training cannot change."""
PLANNED = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_gib")


@dataclass(frozen=True)
class Change:
    """One metric of one evaluation set of one run: (iteration, value) before and after, and the best."""

    run: int  # place among the runs
    split: str
    key: str
    before: tuple[int, float]
    after: tuple[int, float] | None  # None if it was evaluated once
    best: tuple[int, float] | None  # None if neither higher nor lower is better
    teachers: Sequence[tuple[str, float]] = ()  # the same metric of teachers

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or '' if that cannot be said."""
        direction = direction_of(self.key)
        if self.after is None or not direction or self.after[1] == self.before[1]:
            return ""
        return "better" if (self.after[1] - self.before[1]) * direction > 0 else "worse"

    @property
    def relative(self) -> float | None:
        """(after - before) / |before|; None if there is no such number."""
        if self.after is None or self.before[1] == 0:
            return None
        return (self.after[1] - self.before[1]) / abs(self.before[1])


@dataclass(frozen=True)
class Figure:
    """A planned and a measured value of one run; None if it is not known."""

    run: int
    key: str
    unit: str
    planned: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured / planned."""
        return self.measured / self.planned if self.measured is not None and self.planned else None


@dataclass(frozen=True)
class Setting:
    """A setting of all runs: its value and origin in each, None where a run does not have it."""

    path: str
    cells: Sequence[tuple[Any, str] | None]

    @property
    def differs(self) -> bool:
        """True if the runs have different values."""
        return any(self._value(cell) != self._value(self.cells[0]) for cell in self.cells)

    @property
    def is_set(self) -> bool:
        """True if some run has it from a file or the command line."""
        return any(cell is not None and cell[1] != DEFAULT for cell in self.cells)

    @staticmethod
    def _value(cell: tuple[Any, str] | None) -> tuple[Any, ...]:
        return () if cell is None else (cell[0],)


def direction_of(key: str) -> int:
    """Return 1 if higher is better, -1 if lower is better, 0 if neither."""
    names = {key.partition("/")[0], key.rpartition("/")[2]}
    return 1 if names & HIGHER_IS_BETTER else -1 if names & LOWER_IS_BETTER else 0


def unit_of(key: str) -> str:
    """Return the unit of a registered metric, '' for others and for pure numbers."""
    try:
        unit = METRICS.find(key).unit
    except KeyError:
        return ""
    return "" if unit == "1" else unit


def help_of(key: str) -> str:
    """Return what a registered metric means, '' for others."""
    try:
        return METRICS.find(key).help
    except KeyError:
        return ""


def changes(runs: Sequence[RunFolder]) -> list[Change]:
    """Return the changes of all evaluations, those of one metric side by side."""
    found = [
        one
        for place, run in enumerate(runs)
        for split, columns in run.splits.items()
        if split != TRAIN
        for one in _changes(place, split, columns)
    ]
    order = {pair: number for number, pair in enumerate(dict.fromkeys((one.split, one.key) for one in found))}
    return sorted(found, key=lambda one: (order[one.split, one.key], one.run))


def _changes(place: int, split: str, columns: Split) -> Iterator[Change]:
    keys = [key for key in columns.keys if _is_result(key)]
    of_teachers = {key: own for key in keys if (own := _student_key(key, keys))}
    for key in keys:
        points = columns.points(key)
        if key in of_teachers:
            continue
        direction = direction_of(key)
        best = max(points, key=lambda point: point[1] * direction) if direction else None
        teachers = [
            (other.split("/")[-2], columns.points(other)[-1][1])
            for other, own in of_teachers.items()
            if own == key
        ]
        after = points[-1] if len(points) > 1 else None
        yield Change(place, split, key, points[0], after, best, teachers)


def _is_result(key: str) -> bool:
    first, last = key.partition("/")[0], key.rpartition("/")[2]
    return first not in NO_TEACHER_KEYS and last not in COUNTS and key not in NOT_DRAWN


def _student_key(key: str, keys: Sequence[str]) -> str | None:
    """Return `eval/<task>/<metric>` for a teacher's `eval/<task>/<teacher>/<metric>`, None for other keys."""
    head, _, metric = key.rpartition("/")
    task, _, teacher = head.rpartition("/")
    own = f"{task}/{metric}"
    return own if key.startswith("eval/") and teacher and own in keys else None


def figures(runs: Sequence[RunFolder]) -> list[Figure]:
    """Return planned and measured figures of the runs that have a plan or a measurement."""
    found = []
    for key in PLANNED:
        for place, run in enumerate(runs):
            planned, measured = run.plan.get(key), _measured(run, key)
            if planned is not None or measured is not None:
                planned = float(planned) if isinstance(planned, (int, float)) else None
                found.append(Figure(place, key, unit_of(key), planned, measured))
    return found


def _measured(run: RunFolder, key: str) -> float | None:
    """Return the median over the training records but the first, which warms up; of memory the peak."""
    values = [value for _, value in run.splits[TRAIN].points(key)] if TRAIN in run.splits else []
    if not values:
        return None
    return max(values) if key == "peak_memory_gib" else median(values[1:] or values)


def compare_settings(runs: Sequence[RunFolder]) -> list[Setting]:
    """Return the settings of all runs in the order of the files.

    A setting that a run of another version lacks is left out unless a run has set it.
    """
    tables = [{one.path: (one.value, one.origin) for one in run.settings} for run in runs]
    paths = dict.fromkeys(path for table in tables for path in table)
    with_file = [table for table in tables if table]
    found = (Setting(path, [table.get(path) for table in with_file]) for path in paths)
    return [one for one in found if one.is_set or None not in one.cells]


def summary(run: RunFolder) -> list[tuple[str, str]]:
    """Return (label, value) of the figures that a reader asks for first."""
    train, valid = run.splits.get(TRAIN), run.splits.get("valid")
    found = []
    for label, split, key in (
        ("held-out KD loss", valid, "kd_loss"),
        ("held-out CE loss", valid, "ce_loss"),
        ("gap closed", valid, "gap_closed"),
        ("held-out top-1 agreement", valid, "top1_agreement"),
        ("training loss", train, "loss"),
    ):
        points = split.points(key) if split else []
        if points:
            form = ".1%" if direction_of(key) > 0 else ".4g"
            first, last = (f"{value:{form}}" for _, value in (points[0], points[-1]))
            is_pair = len(points) > 1 and key != "gap_closed"
            found.append((label, f"{first} \u2192 {last}" if is_pair else last))
    speed = _measured(run, "tokens_per_s_per_gpu")
    if speed is not None:
        found.append(("tokens/s per GPU", f"{speed:,.0f}"))
    sides = sides_advice(run)
    if sides is not None:
        found.append(("student and teachers", sides))
    tokens = train.points("consumed_tokens") if train else []
    if tokens:
        found.append(("tokens", f"{tokens[-1][1]:,.0f}"))
    return found


def number(value: float | None) -> str:
    """Format a value of a table."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
