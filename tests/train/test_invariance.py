"""Check the invariance table: one process is the reference for every layout."""

from __future__ import annotations

import pytest

from tests.train.invariance import LAYOUTS, SINGLE, errors_of, make_pair, require_equal, run_layout

UPDATES = 2  # the table has more
QUICK = {
    "TP2 + sequence parallel",
    "PP2 uneven",
    "PP4",
    "PP2 VPP2 CP2 micro-batch 2",
    "CP2 DP2 micro-batch 2 + overlapped communication",
    "TP2 CP2 + sequence parallel, micro-batch 4",
    "micro-batch 4",
}
"""Each kind of parallelism and of memory saving occurs, mostly in combination."""


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    student, teacher = make_pair(folder)
    (single,) = ranks.run(run_layout, 1, SINGLE, student, teacher, folder / "single", UPDATES)
    return folder, student, teacher, single


def test_the_quick_layouts_are_in_the_table():
    assert {layout.name for layout in LAYOUTS} > QUICK


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, id=one.name, marks=[] if one.name in QUICK else pytest.mark.slow) for one in LAYOUTS],
)
def test_layout_equals_one_process(layout, reference, ranks):
    folder, student, teacher, single = reference
    results = ranks.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))
