"""Check requirement lines, exit codes and tables."""

from __future__ import annotations

import pytest

from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, merge, table


def test_a_line_says_value_bound_and_verdict():
    line = Requirement("R1", 0.8412, "of copy bandwidth", ">=", 0.80).line()
    assert line == "R1 PASS 0.841 of copy bandwidth (required >= 0.8)"
    assert Requirement("R4", 0.03, "u", "<=", 0.02).line() == "R4 FAIL 0.03 u (required <= 0.02)"
    assert Skipped("R3", "no peer").line() == "R3 SKIP no peer"


@pytest.mark.parametrize("relation", [">=", "<="])
def test_equal_passes_and_nan_fails(relation):
    assert Requirement("R1", 1.0, "", relation, 1.0).passed
    assert not Requirement("R1", float("nan"), "", relation, 1.0).passed


def test_exit_codes():
    missed = Report([Requirement("R1", 0.1, "", ">=", 1.0)])
    fine = Report([Requirement("R1", 1.0, "", ">=", 1.0), Skipped("R3", "")])
    wrong = Report([], wrong=["mkd jsd"])
    assert [report.exit_code(strict=False) for report in (missed, fine, wrong)] == [0, 0, 1]
    assert [report.exit_code(strict=True) for report in (missed, fine, wrong)] == [1, 0, 1]
    assert merge([missed, fine, wrong]).lines()[0] == "WRONG mkd jsd"
    assert len(merge([missed, fine]).requirements) == 3


def test_table_is_aligned():
    text = table("t", ["", "ms"], [["a", "1.0"], ["long", "10.0"]])
    assert text.splitlines() == ["t", "        ms", "a      1.0", "long  10.0"]
