"""The invariance table as tests: one process is the reference for every layout."""

from __future__ import annotations

import pytest

from tests.train.invariance import LAYOUTS, SINGLE, TOLERANCE, compare, make_pair, run_layout


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    student, teacher = make_pair(folder)
    (single,) = ranks.run(run_layout, 1, SINGLE, student, teacher, folder / "single")
    return folder, student, teacher, single


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout, reference, ranks):
    folder, student, teacher, single = reference
    errors = compare(layout, ranks, student, teacher, folder, single)
    for part in ("loss", "evaluation", "last step", "grad norm", "gradient", "updated"):
        assert errors[part] <= TOLERANCE, f"{part}: {errors}"
