"""Check the page of all errors, which is made on request."""

from __future__ import annotations

import re

from mkd.error_codes.code_meanings import MEANINGS
from tools import make_docs


def test_the_page_has_every_code_with_its_texts(tmp_path):
    """Codes are the headings, in alphabetical order."""
    before = {path: path.stat().st_mtime_ns for path in (make_docs.ROOT / "docs").iterdir()}
    assert make_docs.main(["--errors", str(tmp_path / "errors.md")]) == 0
    text = (tmp_path / "errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == sorted(code for codes in MEANINGS.values() for code in codes)
    assert "* **--split ... is not a split**  \n  why: " in text
    assert "| 65 | Training or evaluation data" in text
    assert before == {path: path.stat().st_mtime_ns for path in (make_docs.ROOT / "docs").iterdir()}
