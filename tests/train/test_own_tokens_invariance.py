"""The table of teachers with their own tokens as tests: one process is the reference for every layout."""

from __future__ import annotations

import json

import pytest

from tests.train.invariance import SP, TOLERANCE, Layout, errors_of
from tests.train.own_tokens_invariance import BY_ENTROPY, LAYOUTS, SELECT, SINGLE, make_files, run_layout

PARTS = ("loss", "evaluation", "last step", "grad norm", "gradient", "updated")
MIXED = [
    layout for layout in LAYOUTS if layout.name in ("TP2 CP2 + sequence parallel, micro-batch 4", "PP2 VPP2, micro-batch 2")
]
SMALL = (Layout("TP2 + sequence parallel", 2, tp=2, flags=SP), Layout("CP2", 2, cp=2))
CASES = (
    *(("partition_kl", (), layout) for layout in LAYOUTS),
    *((loss, (), layout) for loss in ("p_kl", "gold") for layout in MIXED),
    *((file, flags, layout) for file, flags in (("equal_weights", SELECT), ("partition_kl", BY_ENTROPY)) for layout in SMALL),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("own_tokens"))
    settings = json.loads((folder / "partition_kl.yaml").read_text())
    for teacher in settings["teachers"]:
        teacher.pop("weight", None)  # a selected teacher has it all
    (folder / "equal_weights.yaml").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def single(folder, ranks):
    """Results of one process by loss and flags; its exports are those of the last one asked for."""
    cached = {}

    def run(loss, flags):
        if (loss, flags) not in cached:
            cached.clear()
            (cached[loss, flags],) = ranks.run(run_layout, 1, SINGLE.with_flags(flags), folder, loss, folder / "single")
        return cached[loss, flags]

    return run


@pytest.mark.parametrize(
    "loss, flags, layout", CASES, ids=[f"{loss} {' '.join(flags[1:2])} {layout.name}" for loss, flags, layout in CASES]
)
def test_layout_equals_one_process(loss, flags, layout, folder, single, ranks):
    reference = single(loss, flags)
    results = ranks.run(run_layout, layout.ranks, layout.with_flags(flags), folder, loss, folder / "layout")
    errors = errors_of(results, folder, reference)
    for part in PARTS:
        assert errors[part] <= TOLERANCE, f"{part}: {errors}"
