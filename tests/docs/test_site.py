"""The documentation as a site: every page is in its navigation, and it builds without a broken link."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.docs.site_hooks import OUTSIDE, navigation, page_of, rewritten, spaced_lists

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = next(filter(None, (shutil.which("mkdocs"), shutil.which(ROOT / "build/docs-env/bin/mkdocs"))), None)


def pages(nav) -> Iterator[str]:
    for one in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from [one] if isinstance(one, str) else pages(one)


def test_every_page_is_once_in_the_navigation():
    files = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(navigation())) == sorted(files | set(OUTSIDE.values()) | {"decisions/index.md"})
    assert all((ROOT / file).is_file() for file in OUTSIDE)


def test_links_out_of_docs_lead_to_their_pages():
    assert page_of("docs/decisions/x.md", "../flags.md") == "flags.md"
    assert page_of("docs/a.md", "decisions/") == "decisions/index.md"
    assert page_of("docs/a.md", "../mkd/train/step.py") is None
    text = "[a](../README.md#start) [b](https://x.y/README.md) [c](#here)\n```\n[d](../README.md)\n```\n"
    assert rewritten(text, "docs/a.md", "a.md") == text.replace("(../README.md#start)", "(about.md#start)")
    assert rewritten("![p](docs/images/p.svg)", "README.md", "about.md") == "![p](images/p.svg)"
    assert rewritten("[a](../README.md)", "docs/decisions/x.md", "decisions/x.md") == "[a](../README.md)"


def test_every_link_leads_to_a_page():
    files = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OUTSIDE)]
    for path in files:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        links = re.findall(
            r"\]\(([^)\s#:]+\.\w+)(?:#[^)]*)?\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        )
        assert not [link for link in links if page_of(name, link) is None], name


def test_code_with_a_file_has_it_as_title():
    text = "```python mkd/a.py\n# Add\n```\n```bash check\nls\n```\n```text\n"
    site = '```python title="mkd/a.py"\n# Add\n```\n```bash\nls\n```\n```text\n'
    assert rewritten(text, "docs/a.md", "a.md") == site


def test_lists_behind_a_paragraph_are_lists():
    assert spaced_lists("text:\n* a\n  more\n* b\n\nend") == "text:\n\n* a\n  more\n* b\n\nend"
    assert spaced_lists("* a\nlazy\n* b\n```\nx\n* y\n```") == "* a\nlazy\n* b\n```\nx\n* y\n```"


@pytest.mark.slow
@pytest.mark.skipif(MKDOCS is None, reason="mkdocs-material is not installed: make docs")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [MKDOCS, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "residency" in (tmp_path / "site/search/search_index.json").read_text(encoding="utf-8")
