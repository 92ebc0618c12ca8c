"""Find texts that open without a head: docstrings and help texts must start with a verb or a noun.

python -m tests.headless    # print every offender, then the number in each folder and in all
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mkd.config.options import all_options
from mkd.kinds.known_kinds import METRICS
from mkd.log.metrics import PER_TAG, PER_TEACHER

ROOT = Path(__file__).resolve().parent.parent
SEARCHED = ("mkd", "tools", "launch", "tests", "pretrain_kd.py")
HEADLESS = re.compile(r"\s*(of|that of|those of|not so|what|whether|how)\b", re.IGNORECASE)
HELP_ARGUMENTS = ("help", "description", "epilog")  # of argparse and of options


def headless_texts() -> list[tuple[str, str]]:
    """Return (place, first line) of every offender: `mkd/run/loop.py:12`, or an option's or metric's name."""
    texts = [*_written_texts(), *_registered_texts()]
    return [(place, text.strip().splitlines()[0]) for place, text in texts if HEADLESS.match(text)]


def count_by_folder(places: list[str]) -> Counter[str]:
    """Count places by the first two folders of their path: `mkd/run`, `tests/xtoken`, `tools`."""
    return Counter("/".join(Path(place).parent.parts[:2]) for place in places)


def _written_texts() -> Iterator[tuple[str, str]]:
    for path in _searched_files():
        name = path.relative_to(ROOT).as_posix()
        for line, text in _texts_of(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{name}:{line}", text


def _searched_files() -> list[Path]:
    places = [ROOT / name for name in SEARCHED]
    return [
        path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
    ]


def _texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, also below constants and fields, and of help arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case ast.keyword(arg=name, value=ast.Constant(value=str(text))) if name in HELP_ARGUMENTS:
                yield node.value.lineno, text


def _registered_texts() -> Iterator[tuple[str, str]]:
    """Yield (place, help) of the options and metrics, whose texts are positional arguments."""
    for option in all_options():
        yield f"mkd/config/{option.path}", option.help
    for metric in METRICS.metrics + PER_TEACHER + PER_TAG:
        yield f"mkd/log/{metric.name}", metric.help


def main() -> None:
    found = headless_texts()
    for place, line in found:
        print(f"{place}: {line}")
    counts = count_by_folder([place for place, _ in found])
    for folder, count in sorted(counts.items()):
        print(f"{count:4d} {folder or 'top level'}")
    print(f"{counts.total():4d} in all")


if __name__ == "__main__":
    main()
