"""Print several invariance tables, one for each pair of models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.ranks import RankPool
from tests.train.invariance import Layout, print_table, run_layout

Table = tuple[str, Callable[[Path], tuple[Path, Path]], Sequence[Layout], tuple[str, ...]]
"""Title, function that makes student and teacher in a folder, layouts, and flags of all runs."""


def print_tables(tables: Sequence[Table], run: Callable = run_layout) -> int:
    """Print the tables; return 1 if a layout of one of them is outside the tolerance, else 0."""
    pool, failed = RankPool(), 0
    for title, make_pair, layouts, flags in tables:
        with tempfile.TemporaryDirectory() as name:
            print(f"{title}\n")
            pair, single = make_pair(Path(name)), Layout("one process", flags=flags)
            rows = [layout.with_flags(flags) for layout in layouts]
            failed += print_table(pool, Path(name), pair, single, rows, run)
    pool.close()
    return int(failed > 0)
