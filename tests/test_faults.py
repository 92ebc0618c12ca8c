"""Every row of the fault table has a test and shows its outcome."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults import ROWS

TESTS = Path(__file__).resolve().parent
EXAMPLE = """
import pytest

@pytest.mark.fault(3)
@pytest.mark.parametrize("number", [1, 2])
def test_good(number): pass

@pytest.mark.fault(3, 4)
def test_of_two_rows(): pass

@pytest.mark.fault(5)
def test_bad(): assert False

@pytest.fixture
def broken(): raise OSError

@pytest.mark.fault(5)
def test_that_never_starts(broken): pass

@pytest.mark.fault(6)
@pytest.mark.skip(reason="no disk")
def test_left_out(): pass

@pytest.mark.fault(7)
def test_that_leaves_itself_out(): pytest.skip("no net")

@pytest.mark.fault("13 save")
def test_of_a_case(): pass
"""


def test_every_row_has_a_test():
    marks = re.compile(r"pytest\.mark\.fault(\(.+?\))")
    others = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__).resolve()]
    named = [rows for path in others for rows in marks.findall(path.read_text(encoding="utf-8"))]
    assert {row for rows in named for row in ast.literal_eval(rows.replace(")", ",)"))} == ROWS.keys()


def table(folder: Path, text: str) -> tuple[int, dict[str, list[str]], str]:
    """Run pytest with the plugin on one file; return (exit code, {row: other cells}, output)."""
    (folder / "test_example.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.faults",
        "-p",
        "no:cacheprovider",
        "test_example.py",
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [
        re.split(r" {2,}", line) for line in ended.stdout.splitlines() if re.match(r"\d+( \w+)* {2,}", line)
    ]
    return ended.returncode, {row: cells for row, *cells in lines}, ended.stdout + ended.stderr


def test_what_the_table_says(tmp_path):
    code, rows, _ = table(tmp_path, EXAMPLE)
    assert code == 1 and list(rows) == [str(row) for row in ROWS]
    assert rows["3"] == [*ROWS[3], "yes", "3 passed, 0 s"]
    assert rows["4"][2:] == ["yes", "1 passed, 0 s"]
    assert rows["5"][2:] == ["NO", "2 failed, 0 s"]
    assert rows["6"][2:] == ["not run", "1 skipped (no disk), 0 s"]
    assert rows["7"][2:] == ["not run", "1 skipped (no net), 0 s"]
    assert rows["8"][2:] == rows["13"][2:] == rows["13 data build"][2:] == ["no test"]
    assert rows["13 save"][2:] == ["yes", "1 passed, 0 s"]


def test_a_row_that_is_not_in_the_table(tmp_path):
    code, _, printed = table(tmp_path, EXAMPLE.replace("fault(6)", "fault(60)"))
    assert code != 0 and "test_left_out: no such row of the fault table: [60]" in printed
