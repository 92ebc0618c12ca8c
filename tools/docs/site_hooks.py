"""Hooks of mkdocs.yml: the navigation of docs/index.md, and the pages that lie outside of docs/.

On GitHub the same files are read as they are, so links lead from docs/ to README.md and others. The site has
these as pages with names of their own, and links are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {  # file -> its page in the site
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tools/benchmarks/results/LATEST.md": "figures.md",
    "tools/benchmarks/results/HISTORY.md": "figures-history.md",
}
FOLDERS = {"docs/decisions": "decisions/index.md"}  # a link to the folder leads to the list of its pages
LATER = ("decisions/", "changelog", "figures", "contributing")  # last among the results of a search
CSS = """
.md-grid { max-width: 76rem; }
.md-typeset h1, .md-typeset h2 { font-weight: 500; color: var(--md-default-fg-color); }
.md-typeset h1 { margin-bottom: .8rem; }
.md-typeset table:not([class]) { font-size: .68rem; }
.md-typeset table:not([class]) td, .md-typeset table:not([class]) th { padding: .5em .8em; min-width: 0; }
.md-typeset td:first-child code { white-space: nowrap; }
"""
_LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
_PAGE = re.compile(r"(^\d+\. )?\[([^\]]+)\]\(([^)#]+\.md)\)", re.M)
_LIST = re.compile(r"^(?:[*+-]|\d+\.) ")
_FENCE = re.compile(r"^```(\w+) (\S+)$", re.M)  # a language, and a file or a word for the tests


def navigation() -> list[dict[str, Any]]:
    """Return the sections of docs/index.md with their pages, in reading order."""
    sections = re.split(r"^## ", (ROOT / "docs/index.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    nav: list[dict[str, Any]] = [{"Home": ["index.md", {"About mkd": "about.md"}]}]
    nav += [{section.split("\n", 1)[0]: list(pages(section))} for section in sections]
    decisions = ["decisions/index.md", *(f"decisions/{path.name}" for path in decision_files())]
    more = [{"Changelog": "changelog.md"}, {"Figures": "figures.md"}, {"Older figures": "figures-history.md"}]
    cards = [f"cards/{path.name}" for path in sorted((ROOT / "docs/cards").glob("*-*.md"))]
    return [*nav, {"History": [*more, {"Cards": cards}, {"Decisions": decisions}]}]


def pages(section: str) -> Iterator[dict[str, str | None] | str | None]:
    """Yield the pages that a section links. A link that starts an item gives its page the name."""
    for starts_item, name, target in _PAGE.findall(section):
        page = page_of("docs/index.md", target)
        yield {name: page} if starts_item else page


def decision_files() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("*.md"), reverse=True)


def page_of(file: str, target: str) -> str | None:
    """Return the page that `target`, a link in `file`, leads to; None: it is not a file of the site."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
    if path in FOLDERS or path in OUTSIDE:
        return (FOLDERS | OUTSIDE)[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewritten(text: str, file: str, page: str) -> str:
    """Return the Markdown of `file` for its place `page` in the site."""

    def link(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        to = page_of(file, target)
        if to is None:  # no page of the site: the build refuses it
            return match[0]
        return start + posixpath.relpath(to, posixpath.dirname(page) or ".") + (anchor or "") + end

    return _FENCE.sub(fence, spaced_lists(outside_of_code(text, lambda part: _LINK.sub(link, part))))


def fence(match: re.Match[str]) -> str:
    """Return the start of fenced code as the site reads it: with the file's name as its title."""
    language, word = match.groups()
    return f'```{language} title="{word}"' if "/" in word else f"```{language}"


def outside_of_code(text: str, change: Any) -> str:
    """Apply `change` to all of `text` but fenced code."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def spaced_lists(text: str) -> str:
    """Put an empty line before a list that follows a paragraph: GitHub needs none, Python's Markdown does."""

    def change(part: str) -> str:
        lines: list[str] = []
        for line in part.split("\n"):
            before = lines[-1] if lines else ""
            follows_text = before.strip() and not before[0].isspace() and not _LIST.match(before)
            if _LIST.match(line) and follows_text and not _in_list(lines):
                lines.append("")
            lines.append(line)
        return "\n".join(lines)

    return outside_of_code(text, change)


def _in_list(lines: list[str]) -> bool:
    """Return True if the last paragraph of `lines` is an item of a list."""
    paragraph = []
    for line in reversed(lines):
        if not line.strip():
            break
        paragraph.append(line)
    return any(_LIST.match(line) for line in paragraph)


def on_config(config: Any) -> Any:
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/, the list of decisions, and the style."""
    from mkdocs.structure.files import File

    titles = [(path.name, path.read_text(encoding="utf-8").split("\n", 1)[0]) for path in decision_files()]
    rows = [f"* {name[:10]}: [{title.removeprefix('# ')}]({name})" for name, title in titles]
    made = {
        "decisions/index.md": "# Decisions\n\nWhy things are as they are, newest first.\n\n" + "\n".join(rows)
    }
    made |= {page: (ROOT / file).read_text(encoding="utf-8") for file, page in OUTSIDE.items()}
    made["site.css"] = CSS
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith(LATER):
        page.meta["search"] = {"boost": 0.2}  # behind the pages that say how it is today
    sources = {there: file for file, there in OUTSIDE.items()}
    return rewritten(markdown, sources.get(uri, f"docs/{uri}"), uri)
