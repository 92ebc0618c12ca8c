"""Check the invariance tables of models with images."""

from __future__ import annotations

import pytest

from tests.train import two_processors, vision_invariance
from tests.train.invariance import Layout, errors_of, require_equal

RUNS = [(table, vision_invariance.run_vision_layout) for table in vision_invariance.TABLES]
RUNS += [(table, two_processors.run_two_processors) for table in two_processors.TABLES]
QUICK = [
    {"TP2 PP2 + SP, units of 2 layers recomputed"},
    set(),
    {"PP2 DP2 + overlapped communication"},
    set(),
    {"EP2 CP2"},
    {"TP2 CP2 + SP, micro-batch 4"},
    {"PP2 VPP2, micro-batch 2"},
]


@pytest.fixture(scope="module")
def references(ranks, tmp_path_factory):
    """Return a function of a table's number that returns its (folder, pair, sums of one process)."""
    made = {}

    def reference(number):
        if number not in made:
            (_, make_pair, _, flags), run = RUNS[number]
            folder = tmp_path_factory.mktemp("vision_invariance")
            pair = make_pair(folder)
            single = Layout("one process", flags=flags)
            (sums,) = ranks.run(run, 1, single, *pair, folder / "single")
            made[number] = folder, pair, sums
        return made[number]

    return reference


ROWS = [
    pytest.param(
        number, one, id=f"{number}-{one.name}", marks=[] if one.name in QUICK[number] else pytest.mark.slow
    )
    for number, ((_, _, layouts, _), _) in enumerate(RUNS)
    for one in layouts
]


@pytest.mark.parametrize("number, layout", ROWS)
def test_layout_equals_one_process(number, layout, references, ranks):
    folder, pair, single = references(number)
    table, run = RUNS[number]
    layout = layout.with_flags(table[3])
    results = ranks.run(run, layout.ranks, layout, *pair, folder / "layout")
    require_equal(errors_of(results, folder, single))


def test_the_quick_layouts_are_in_the_tables():
    for quick, ((_, _, layouts, _), _) in zip(QUICK, RUNS, strict=True):
        assert quick < {layout.name for layout in layouts}
