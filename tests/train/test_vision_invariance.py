"""Check the invariance tables of models with images."""

from __future__ import annotations

import pytest

from tests.train.invariance import Layout, errors_of, require_equal
from tests.train.vision_invariance import TABLES, run_vision_layout

QUICK = {"TP2 CP2", "PP2, units of 4 layers recomputed", "PP2 DP2 + overlapped communication"}


@pytest.fixture(scope="module")
def references(ranks, tmp_path_factory):
    """Return a function of a table's number that returns its (folder, pair, sums of one process)."""
    made = {}

    def reference(number):
        if number not in made:
            _, make_pair, _, flags = TABLES[number]
            folder = tmp_path_factory.mktemp("vision_invariance")
            pair = make_pair(folder)
            single = Layout("one process", flags=flags)
            (sums,) = ranks.run(run_vision_layout, 1, single, *pair, folder / "single")
            made[number] = folder, pair, sums
        return made[number]

    return reference


ROWS = [
    pytest.param(number, one, id=f"{number}-{one.name}", marks=[] if one.name in QUICK else pytest.mark.slow)
    for number, (_, _, layouts, _) in enumerate(TABLES)
    for one in layouts
]


@pytest.mark.parametrize("number, layout", ROWS)
def test_layout_equals_one_process(number, layout, references, ranks):
    folder, pair, single = references(number)
    layout = layout.with_flags(TABLES[number][3])
    results = ranks.run(run_vision_layout, layout.ranks, layout, *pair, folder / "layout")
    require_equal(errors_of(results, folder, single))


def test_the_quick_layouts_are_in_the_tables():
    assert {layout.name for _, _, layouts, _ in TABLES for layout in layouts} > QUICK
