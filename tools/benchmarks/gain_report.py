"""Tables and recorded figures of `teacher_gain.py`."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date
from pathlib import Path

from tools.benchmarks.results import Figure, current_commit

SELF, EXPERTS = "self-teachers", "experts"
FIGURES = {"test": "sums solved", "code": "bits per byte of code"}
COLUMNS = ("rate", "seeds", *FIGURES.values(), "seconds of training")


@dataclass(frozen=True)
class Run:
    """One run, or a model that no run of its part trains, at learning rate 0."""

    part: str  # SELF, EXPERTS, or "" for what both start from
    arm: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.part} {self.arm} {self.lr:g} {self.seed}" if self.part else self.arm


Figures = Mapping[Run, Mapping[str, float]]


def best_rate(figures: Figures, part: str, arm: str) -> float | None:
    """Return the learning rate that solves most validation problems with the first seed."""
    of_arm = {run: one["valid"] for run, one in figures.items() if (run.part, run.arm) == (part, arm)}
    first = min((run.seed for run in of_arm), default=0)
    of_seed = {run.lr: solved for run, solved in of_arm.items() if run.seed == first}
    return max(of_seed, key=lambda lr: of_seed[lr], default=None)


def rows_of(figures: Figures, part: str) -> dict[str, dict[Run, Mapping[str, float]]]:
    """Return the runs of each row of a table, at the arm's best learning rate."""
    rows: dict[str, dict[Run, Mapping[str, float]]] = {}
    for run, found in sorted(figures.items(), key=lambda one: (one[0].lr > 0, one[0].seed)):
        if run.part == part and run.lr == best_rate(figures, part, run.arm):
            rows.setdefault(run.arm, {})[run] = found
    return rows


def tables(figures: Figures, parts: Sequence[str]) -> list[str]:
    """Return the lines of the tables: means and standard deviations over seeds."""
    lines = []
    for part in parts:
        lines += ["", f"| {part} | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
        for arm, found in rows_of(figures, part).items():
            cells = [mean_and_spread([one[key] for one in found.values()]) for key in FIGURES]
            seconds = statistics.fmean(one["seconds"] for one in found.values())
            lr = next(iter(found)).lr
            words = (arm, f"{lr:g}" if lr else "", str(len(found)), *cells, f"{seconds:.0f}" if lr else "")
            lines.append(f"| {' | '.join(words)} |")
    tried = [(run, one) for run, one in figures.items() if run.part and run.lr]
    lines += ["", "every run: sums solved of validation, test; bits per byte of code"]
    lines += [f"{run.name}: {one['valid']:.3f} {one['test']:.3f} {one['code']:.4f}" for run, one in tried]
    return lines


def mean_and_spread(values: Sequence[float]) -> str:
    spread = f" ({statistics.stdev(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def write_csv(figures: Figures, parts: Sequence[str], machine: str, path: Path) -> None:
    """Write median, lowest and highest figure of each row, in the form of the recorded figures."""
    facts = (date.today().isoformat(), machine, current_commit() or "unknown", "teacher_gain")
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([one.name for one in fields(Figure)])
        for part in parts:
            for arm, found in rows_of(figures, part).items():
                for key, quantity in FIGURES.items():
                    numbers = sorted(one[key] for one in found.values())
                    cells = [f"{statistics.median_low(numbers):.4g}"]
                    if len(numbers) > 1:
                        cells += [f"{numbers[0]:.4g}", f"{numbers[-1]:.4g}"]
                    writer.writerow(astuple(Figure(*facts, part, arm, quantity, "", *cells)))
