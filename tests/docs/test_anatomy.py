"""The excerpts of docs/anatomy-of-a-step.md stand in the files that they name, and its files exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "anatomy-of-a-step.md").read_text(encoding="utf-8")


def test_excerpts_are_in_their_files():
    excerpts = re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(excerpts) >= 3
    assert [file for file, text in excerpts if text not in (ROOT / file).read_text(encoding="utf-8")] == []


def test_named_files_exist():
    files = set(re.findall(r"`(mkd/[\w/]+\.py)`", PAGE))
    assert len(files) > 10
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []
