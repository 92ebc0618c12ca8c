"""The table of habits answers each with yes, or with no and the reason."""

from __future__ import annotations

import re

from tests.docs.documented_commands import ROOT

PAGE = ROOT / "docs/questions/habits.md"


def test_every_no_has_its_reason():
    rows = re.findall(r"^\| (?!---)(.+) \|$", PAGE.read_text(encoding="utf-8").partition("## ")[0], re.M)
    answers = {cells[0]: cells[-1] for cells in (re.split(r" ?\| ", row) for row in rows[1:])}
    assert len(answers) > 30
    unclear = {habit: answer for habit, answer in answers.items() if not re.match(r"(yes|no:)", answer)}
    assert unclear == {}
    bare = {
        habit for habit, answer in answers.items() if answer.startswith("no:") and len(answer.split()) < 8
    }
    assert bare == set()
