"""Every recipe of docs/extending.md works: applied to a copy of the tree, then checked by its command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)


@dataclass
class Recipe:
    """One `## Add ...` section: what it changes, and the command that shows that the change works."""

    changes: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, file, text)
    check: str = ""

    @property
    def product_files(self) -> set[str]:
        return {file for _, file, _ in self.changes if file.startswith("mkd/")}


def read_recipes() -> dict[str, Recipe]:
    """Return the recipes by title."""
    recipes = {}
    for section in re.split(r"^## Add ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        recipe = recipes[section.split("\n", 1)[0]] = Recipe()
        for kind, file, text in BLOCK.findall(section):
            if kind == "bash":
                recipe.check = text
            else:
                recipe.changes.append((kind, file, text))
    return recipes


RECIPES = read_recipes()
LANDED = "a loss with data of its own"  # its blocks quote the files of a kind that mkd has
LONG = {
    title
    for title in RECIPES
    if title == LANDED or any(word in title for word in ("family", "file", "metric", "place", "completions"))
}


def apply(root: Path, kind: str, file: str, text: str) -> None:
    """Write a new file, or apply a diff whose old lines stand in the file exactly once."""
    path = root / file
    if kind != "diff":
        if path.exists() and lines_of(text) in lines_of(path.read_text(encoding="utf-8")):
            return  # a quote
        assert not path.exists(), f"{file} exists: the recipe should show a diff"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    for hunk in re.split(r"^@@.*\n", text, flags=re.M):
        if hunk.strip():
            old = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " -")
            new = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " +")
            content = path.read_text(encoding="utf-8")
            if new in content:
                continue  # somebody has followed the page
            assert content.count(old) == 1, f"{file} holds these lines {content.count(old)} times:\n{old}"
            path.write_text(content.replace(old, new), encoding="utf-8")


def test_the_page_has_a_recipe_for_every_plug():
    kinds = ("divergence", "preference pairs", "data of its own", "model family", "record kind", "metric")
    kinds += ("kind of file", "kind of teacher", "source of completions", "place")
    assert [kind for kind in kinds if not any(kind in title for title in RECIPES)] == []


def test_the_page_counts_the_product_files_of_every_recipe():
    rows = r"^\| \[(an? [^]]+)\]\(\S+\) \| [^|]+ \| (\d+)[^|]* \|$"
    table = re.findall(rows, PAGE.read_text(encoding="utf-8"), re.M)
    assert {title: int(number) for title, number in table} == {
        title: len(recipe.product_files) for title, recipe in RECIPES.items()
    }


def test_the_recipe_of_a_kind_that_mkd_has_names_all_its_files_and_quotes_them():
    names = re.compile(r"weighted/|weight_key|kinds\.weighted|WeightConfig|Weighted\(")
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "mkd").rglob("*.py")}
    about = {file for file, path in files.items() if names.search(path.read_text(encoding="utf-8"))}
    about |= {file for file in files if file.startswith("mkd/kinds/weighted/")}
    assert RECIPES[LANDED].product_files == about and len(about) <= 8
    for kind, file, text in RECIPES[LANDED].changes:
        content = lines_of(files[file].read_text(encoding="utf-8"))
        for hunk in re.split(r"^@@.*\n", text, flags=re.M) if kind == "diff" else [text]:
            new = (line[1:] for line in hunk.splitlines() if line[0] in " +") if kind == "diff" else [hunk]
            assert lines_of("\n".join(new)) in content, f"{file} does not hold the lines of the page"


def test_the_changes_of_every_recipe_fit_the_tree(tmp_path):
    """The checks of some recipes are slow tests; this one finds stale lines and full files at once."""
    for kind, file, text in (change for recipe in RECIPES.values() for change in recipe.changes):
        if kind == "diff" and not (tmp_path / file).exists():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
        elif (ROOT / file).exists() and kind != "diff":
            continue  # a quote, see `apply`
        apply(tmp_path, kind, file, text)
    lengths = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "mkd").rglob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > 400}, "no room for a recipe"


def lines_of(text: str) -> str:
    """Return the lines without indentation and blank ones: the page's are formatted on their own."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the tree, to which recipes are added one after the other."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("mkd", "tools", "tests", "configs", "docs", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pretrain_kd.py", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, folder / file)
    return folder


@pytest.mark.parametrize(
    "title", [pytest.param(one, marks=[pytest.mark.slow] if one in LONG else []) for one in RECIPES]
)
def test_a_recipe_works_on_a_copy_of_the_tree(title, tree):
    recipe = RECIPES[title]
    assert recipe.changes and recipe.check
    for change in recipe.changes:
        apply(tree, *change)
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "TMPDIR": str(tree.parent),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euc", recipe.check], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
