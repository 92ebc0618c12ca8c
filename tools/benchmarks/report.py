"""What a benchmark prints: a table of measurements, then one line per requirement. Ratios, because they travel."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

_RELATIONS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Requirement:
    """One measured ratio and its bound. `relation` is ">=" or "<="; NaN never passes."""

    id: str  # R1 ... R12
    value: float
    what: str  # reads on from the value: "of copy bandwidth"
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
    """A requirement that could not be measured here."""

    id: str
    why: str
    passed = True

    def line(self) -> str:
        return f"{self.id} SKIP {self.why}"


@dataclass(frozen=True)
class Report:
    """The result of one benchmark: requirement lines, and the arms of our own that computed something wrong."""

    requirements: Sequence[Requirement | Skipped]
    wrong: Sequence[str] = ()

    def lines(self) -> list[str]:
        return [f"WRONG {name}" for name in self.wrong] + [
            requirement.line() for requirement in self.requirements
        ]

    def exit_code(self, strict: bool) -> int:
        """1 for a wrong result of ours; with `strict` also for a missed requirement; else 0."""
        missed = any(not requirement.passed for requirement in self.requirements)
        return int(bool(self.wrong) or (strict and missed))


def merge(reports: Sequence[Report]) -> Report:
    return Report(
        [requirement for report in reports for requirement in report.requirements],
        [name for report in reports for name in report.wrong],
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
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
