"""Check runs in which no teacher runs beside the student: every step of every layout equals one process."""

from __future__ import annotations

import os

import pytest

from tests.train.without_teacher import (
    EXPORTS,
    LAYOUTS,
    RUNS,
    SINGLE,
    STEPS,
    TOLERANCE,
    make_files,
    run,
    worst_error,
)

QUICK = {
    ("cross entropy, held-out text and tasks", "PP2 VPP2"),
    ("stored teacher", "PP2 VPP2"),
    ("GRPO, 3 updates", "PP2 VPP2"),
}
NUM_STEPS = STEPS if os.environ.get("MKD_SLOW") else 3  # the old communicator gave NaN in the first
CASES = [(kind, layout) for kind in (*RUNS, *EXPORTS) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def files(tmp_path_factory, ranks):
    folder = make_files(tmp_path_factory.mktemp("without_teacher"))
    for kind, out in EXPORTS.items():
        run(folder, kind, ranks, SINGLE, out)
    return folder


@pytest.fixture(scope="module")
def reference(files, ranks):
    """Return a function that runs one process of a kind, once while its layouts follow each other."""
    done = []

    def run_single(kind: str) -> None:
        if done[-1:] != [kind]:
            run(files, kind, ranks, SINGLE, "single", NUM_STEPS)
            done.append(kind)

    return run_single


def test_the_quick_rows_are_in_the_table():
    assert {(kind, layout.name) for kind, layout in CASES} > QUICK


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(
            kind,
            layout,
            id=f"{kind}, {layout.name}",
            marks=[] if (kind, layout.name) in QUICK else pytest.mark.slow,
        )
        for kind, layout in CASES
    ],
)
def test_every_step_equals_one_process(kind, layout, files, reference, ranks):
    reference(kind)
    errors = worst_error(files, kind, ranks, layout, NUM_STEPS)
    assert max(errors.values()) <= TOLERANCE, errors
