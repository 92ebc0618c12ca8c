"""Record figures in results/*.csv: append a benchmark's medians, and make the table of results/LATEST.md.

A row is one figure of one run. `median` is empty where only the range of several runs is known, `lowest` and
`highest`. `commit` is the commit that ran; for the rows of 2026-11-21 and 2026-11-22 it is the commit that
recorded the figure.
"""

from __future__ import annotations

import csv
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
BENCHMARKS = (
    "ceilings",
    "logits",
    "head",
    "library",
    "chunks",
    "step",
    "graphs",
    "layouts",
    "trainers",
    "pipeline",
    "mixer",
    "packing",
    "corpus",
    "tokenise",
    "gain",
)  # in the table's order
HEAD = ("benchmark", "case", "arm", "latest median", "spread", "other figures", "date")

Times = Mapping[str, Mapping[str, float]]
"""Case -> arm -> median time in ms."""


@dataclass(frozen=True)
class Figure:
    """One row of a CSV file. Numbers stay text, with the digits that were recorded."""

    date: str  # YYYY-MM-DD
    machine: str
    commit: str
    command: str  # arguments of tools/benchmark.py
    case: str
    arm: str
    quantity: str  # "time", "peak", "MFU" ...
    unit: str
    median: str
    lowest: str = ""
    highest: str = ""

    def numbers(self) -> list[str]:
        return [text for text in (self.median, self.lowest, self.highest) if text]


def read_figures(benchmark: str, folder: Path = RESULTS) -> list[Figure]:
    """Return the figures of one benchmark, oldest first within an arm."""
    with open(folder / f"{benchmark}.csv", encoding="utf-8", newline="") as file:
        return [Figure(**row) for row in csv.DictReader(file)]


@dataclass(frozen=True)
class Other:
    """A figure of a run that is not a time in ms."""

    case: str
    arm: str
    quantity: str
    unit: str
    value: float


def append_figures(
    path: Path, machine: str, argv: Sequence[str], times: Times, others: Sequence[Other] = ()
) -> None:
    """Append the medians of a run to a CSV file, with a header if the file is new."""
    command = shlex.join(argument for argument in argv if argument and argument not in ("--csv", str(path)))
    today, commit = date.today().isoformat(), current_commit()
    rows = [
        Figure(today, machine, commit, command, case, arm, "time", "ms", f"{ms:.4g}")
        for case, of_case in times.items()
        for arm, ms in of_case.items()
    ]
    rows += [
        Figure(today, machine, commit, command, one.case, one.arm, one.quantity, one.unit, f"{one.value:.4g}")
        for one in others
    ]
    is_new = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([field.name for field in fields(Figure)])
        writer.writerows(astuple(row) for row in rows)


def current_commit() -> str:
    """Return the short commit of the repository, empty outside of one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def latest_medians(folder: Path = RESULTS) -> list[tuple[str, ...]]:
    """Return the table of the latest medians: a row per benchmark, case and arm, head first."""
    rows: list[tuple[str, ...]] = [HEAD]
    for benchmark in BENCHMARKS:
        groups: dict[tuple[str, str], list[Figure]] = {}
        for figure in read_figures(benchmark, folder):
            groups.setdefault((figure.case, figure.arm), []).append(figure)
        for (case, arm), figures in sorted(groups.items(), key=lambda item: _place(item[0][0], groups)):
            rows.append((benchmark, case, arm, *_cells(figures)))
    return rows


def _place(case: str, groups: Mapping[tuple[str, str], object]) -> int:
    """Return the rank of a case by its first appearance, so that the arms of a case stand together."""
    return list(dict.fromkeys(one for one, _ in groups)).index(case)


def _cells(figures: Sequence[Figure]) -> tuple[str, ...]:
    """Return latest median, spread, other figures and date; the first quantity of an arm is its main one."""
    by_quantity: dict[str, list[Figure]] = {}
    for figure in figures:
        by_quantity.setdefault(figure.quantity, []).append(figure)
    (name, main), *others = by_quantity.items()
    label = "" if name in ("time", "rate") else f"{name} "
    day = _latest_day(main)
    rest = [(other, _latest(of), _spread(of, "({})"), _other_day(of, day)) for other, of in others]
    texts = [" ".join(filter(None, parts)) for parts in rest]
    return (label + _latest(main)).rstrip(), _spread(main), "; ".join(texts), day


def _latest_day(figures: Sequence[Figure]) -> str:
    """Return the last day with a median, or the last day of all if only ranges are known."""
    return max((figure.date for figure in figures if figure.median), default=max(one.date for one in figures))


def _other_day(figures: Sequence[Figure], day: str) -> str:
    return "" if _latest_day(figures) == day else f"on {_latest_day(figures)}"


def _latest(figures: Sequence[Figure]) -> str:
    """Return the median of the medians of the latest day, one that was recorded.

    Return an empty string if only ranges are known.
    """
    measured = [figure for figure in figures if figure.median]
    if not measured:
        return ""
    latest = max(figure.date for figure in measured)
    of_day = sorted(
        (figure for figure in measured if figure.date == latest), key=lambda one: float(one.median)
    )
    middle = of_day[(len(of_day) - 1) // 2]
    return f"{middle.median} {middle.unit}".rstrip()


def _spread(figures: Sequence[Figure], form: str = "{}") -> str:
    """Return `lowest to highest` over all recorded runs; empty if there was one."""
    numbers = sorted((text for figure in figures for text in figure.numbers()), key=float)
    return form.format(f"{numbers[0]} to {numbers[-1]}") if len(numbers) > 1 else ""
