"""Print a benchmark: a table of measurements, then one line per requirement.

Requirements are ratios, because ratios hold on other machines too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.benchmarks.results import Other, Times

_RELATIONS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Requirement:
    """One measured ratio and its bound. `relation` is ">=" or "<="; NaN never passes."""

    id: str  # R1 ... R12
    value: float
    what: str  # continues the value: "of copy bandwidth"
    relation: str
    bound: float

    @property
    def passed(self) -> bool:
        return _RELATIONS[self.relation](self.value, self.bound)

    def line(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{self.id} {verdict} {self.value:.3g} {self.what} (required {self.relation} {self.bound:g})"


@dataclass(frozen=True)
class Skipped:
    """A requirement that cannot be measured here."""

    id: str
    why: str
    passed = True

    def line(self) -> str:
        return f"{self.id} SKIP {self.why}"


@dataclass(frozen=True)
class Report:
    """Result of a benchmark: requirement lines, mkd's arms that computed something wrong, and the medians."""

    requirements: Sequence[Requirement | Skipped]
    wrong: Sequence[str] = ()
    times: Times = field(default_factory=dict)
    others: Sequence[Other] = ()

    def lines(self) -> list[str]:
        return [f"WRONG {name}" for name in self.wrong] + [
            requirement.line() for requirement in self.requirements
        ]

    def exit_code(self, strict: bool) -> int:
        """Return 1 for a wrong result of mkd's, and with `strict` for a missed requirement; else 0."""
        missed = any(not requirement.passed for requirement in self.requirements)
        return int(bool(self.wrong) or (strict and missed))


def merge(reports: Sequence[Report]) -> Report:
    """Join the reports of several cases."""
    return Report(
        [requirement for report in reports for requirement in report.requirements],
        [name for report in reports for name in report.wrong],
        {case: times for report in reports for case, times in report.times.items()},
        [figure for report in reports for figure in report.others],
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned text: the first column to the left, the others to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [title]
    for first, *others in cells:
        columns = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
        ]
        lines.append("  ".join(columns).rstrip())
    return "\n".join(lines)
