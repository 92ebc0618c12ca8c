"""Check rows of the invariance table for Nemotron-H, also beside a dense model."""

from __future__ import annotations

import pytest

from tests.tiny_models import make_model
from tests.train.invariance import (
    DISTRIBUTED,
    FULL,
    OVERLAP,
    PEERS,
    SINGLE,
    SP,
    Layout,
    add_text,
    errors_of,
    require_equal,
    run_layout,
)
from tests.train.moe_invariance import EP2, ON_HOST

UPDATES = 3
ADAM = ("--adam-eps", "1e-6")  # see test_latent_invariance.py
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "mixer", "core_attn", "moe")
WIDER = dict(hidden_size=64, vocab_size=330, mamba_head_dim=5)
PAIRS = {  # student, teacher
    "nemotron": ("nemotron_h-experts", "nemotron_h"),
    "dense teacher": ("nemotron_h", "qwen3"),
    "dense student": ("qwen3", "nemotron_h-experts"),
}
UNEVEN = ("--student-pipeline-layout", "3,1")
BOTH = Layout("TP2 + SP, PP2 uneven", 4, tp=2, pp=2, flags=SP + UNEVEN)
CASES = (
    *(
        ("nemotron", one)
        for one in (
            Layout("EP2 TP2 + SP, mixer recomputed", 2, tp=2, flags=EP2 + SP + RECOMPUTED),
            Layout("EP2", 2, flags=EP2),
            Layout("PP2 uneven", 2, pp=2, flags=("--student-pipeline-layout", "1,3")),
            Layout("PP2 auto", 2, pp=2, flags=("--pipeline-layout", "auto")),
            Layout("PP2 VPP2, full recomputation", 2, pp=2, vp=2, flags=FULL),
            Layout("CP2", 2, cp=2),
            Layout("DP2 + overlapped communication", 2, flags=OVERLAP),
            Layout("documents permuted", permuted=True),
            Layout("EP2 TP2 CP2 + SP, distributed, micro-batch 2", 4, tp=2, cp=2, micro=2).with_flags(
                EP2 + SP + DISTRIBUTED + RECOMPUTED
            ),
        )
    ),
    ("dense teacher", Layout("TP2", 2, tp=2)),
    ("dense teacher", BOTH),
    ("dense student", BOTH),
    ("dense student", Layout("teacher on the host", flags=ON_HOST)),
    ("dense student", Layout("DP2, teacher over 2 peers", 2, flags=PEERS[2])),
)
QUICK = {"EP2 TP2 + SP, mixer recomputed", "CP2"}


@pytest.fixture(scope="module")
def references(ranks, tmp_path_factory):
    """Return a function: name of a pair -> folder, student, teacher, and the run in one process."""
    found = {}

    def run(pair):
        if pair not in found:
            folder = tmp_path_factory.mktemp("invariance")
            student = add_text(make_model(folder / "student", PAIRS[pair][0], seed=1))
            wider = WIDER if PAIRS[pair][1] != "qwen3" else {}
            teacher = make_model(folder / "teacher", PAIRS[pair][1], seed=2, **wider)
            layout = SINGLE.with_flags(ADAM)
            (single,) = ranks.run(run_layout, 1, layout, student, teacher, folder / "single", UPDATES)
            found[pair] = folder, student, teacher, single
        return found[pair]

    return run


@pytest.mark.parametrize(
    ("pair", "layout"),
    [
        pytest.param(
            *one, id=f"{one[0]}, {one[1].name}", marks=[] if one[1].name in QUICK else pytest.mark.slow
        )
        for one in CASES
    ],
)
def test_layout_equals_one_process(pair, layout, references, ranks):
    folder, student, teacher, single = references(pair)
    layout = layout.with_flags(ADAM)
    results = ranks.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))
