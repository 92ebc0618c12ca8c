"""Check the time in which transfers run alone."""

from __future__ import annotations

import pytest

from tools.benchmarks.overlap import overlap_of


@pytest.mark.parametrize(
    ("transfers", "others", "expected"),
    [
        ([], [], (0, 0, 0, 0)),
        ([(0, 4)], [], (4, 4, 4, 4)),
        ([(1, 3)], [(0, 4)], (2, 0, 4, 4)),
        ([(3, 7)], [(0, 4), (6, 8)], (4, 2, 8, 8)),
        ([(0, 2), (1, 5)], [(4, 6), (5, 9)], (5, 4, 9, 9)),
        ([(0, 1)], [(3, 4)], (1, 1, 2, 4)),
    ],
)
def test_intervals(transfers, others, expected):
    found = overlap_of(
        [(1000 * a, 1000 * b) for a, b in transfers], [(1000 * a, 1000 * b) for a, b in others]
    )
    assert (found.transfer_ms, found.exposed_ms, found.busy_ms, found.span_ms) == expected
    assert "transfers" in found.describe()
