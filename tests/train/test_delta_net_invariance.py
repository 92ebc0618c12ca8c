"""Check rows of the invariance table for a Qwen3-Next student and a Qwen3.5 teacher."""

from __future__ import annotations

import pytest

from tests.tiny_models import make_model
from tests.train.invariance import (
    DISTRIBUTED,
    FULL,
    OVERLAP,
    SINGLE,
    SP,
    Layout,
    add_text,
    errors_of,
    require_equal,
    run_layout,
)
from tests.train.moe_invariance import EP2

UPDATES = 3
ADAM = ("--adam-eps", "1e-6")  # see test_latent_invariance.py
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "mixer", "core_attn")
LAYOUTS = (
    Layout("TP2 + SP, mixer recomputed", 2, tp=2, flags=SP + RECOMPUTED),
    Layout("PP2 uneven", 2, pp=2, flags=("--student-pipeline-layout", "3,1")),
    Layout("PP2 auto", 2, pp=2, flags=("--pipeline-layout", "auto")),
    Layout("PP2 VPP2, full recomputation", 2, pp=2, vp=2, flags=FULL),
    Layout("CP2", 2, cp=2),
    Layout("DP2 + overlapped communication", 2, flags=OVERLAP),
    Layout("EP2", 2, flags=EP2),
    Layout("mixer recomputed", flags=RECOMPUTED),
    Layout("documents permuted", permuted=True),
    Layout("EP2 TP2 CP2 + SP, distributed, micro-batch 2", 4, tp=2, cp=2, micro=2).with_flags(
        EP2 + SP + DISTRIBUTED + RECOMPUTED
    ),
)
QUICK = {"TP2 + SP, mixer recomputed", "PP2 VPP2, full recomputation", "CP2"}


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    student = add_text(make_model(folder / "student", "qwen3_next", seed=1))
    wider = dict(num_hidden_layers=8, hidden_size=64, vocab_size=330, linear_key_head_dim=10)
    teacher = make_model(folder / "teacher", "qwen3_5", seed=2, **wider)
    layout = SINGLE.with_flags(ADAM)
    (single,) = ranks.run(run_layout, 1, layout, student, teacher, folder / "single", UPDATES)
    return folder, student, teacher, single


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, id=one.name, marks=[] if one.name in QUICK else pytest.mark.slow) for one in LAYOUTS],
)
def test_layout_equals_one_process(layout, reference, ranks):
    folder, student, teacher, single = reference
    layout = layout.with_flags(ADAM)
    results = ranks.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))


def test_the_quick_layouts_are_in_the_table():
    assert {layout.name for layout in LAYOUTS} > QUICK
