"""Check rows of the invariance table for a DeepSeek-V3 student and a Moonlight teacher."""

from __future__ import annotations

import pytest

from tests.tiny_models import make_model
from tests.train.invariance import (
    FULL,
    SELECTIVE,
    SINGLE,
    SP,
    Layout,
    add_text,
    errors_of,
    require_equal,
    run_layout,
)
from tests.train.moe_invariance import LATENT_LAYOUTS, MOVED, make_latent_pair

UPDATES = 2
# At 1e-8 Adam's first steps are gradient / |gradient| down to gradients of 1e-7, whose rounding is as large:
# Adam's formula in float64 makes the same differences of weights (to 9e-9) from two layouts' gradients.
ADAM = ("--adam-eps", "1e-6")
LAYOUTS = (
    Layout("TP2", 2, tp=2),
    Layout("TP2 + sequence parallel, selective recomputation", 2, tp=2, flags=SP + SELECTIVE),
    Layout("PP2 VPP2, full recomputation", 2, pp=2, vp=2, flags=FULL),
    Layout("CP2", 2, cp=2),
    Layout("TP2 PP2 + SP, micro-batch 2", 4, tp=2, pp=2, micro=2, flags=SP),
)


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    student = add_text(make_model(folder / "student", "deepseek", seed=1))
    wider = dict(num_hidden_layers=8, hidden_size=64, kv_lora_rank=24, vocab_size=330)
    teacher = make_model(folder / "teacher", "moonlight", seed=2, **wider)
    layout = SINGLE.with_flags(ADAM)
    (single,) = ranks.run(run_layout, 1, layout, student, teacher, folder / "single", UPDATES)
    return folder, student, teacher, single


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, id=one.name, marks=[] if one.flags and one.ranks == 2 else [pytest.mark.slow])
        for one in LAYOUTS
    ],
)
def test_layout_equals_one_process(layout, reference, ranks):
    require_same(layout.with_flags(ADAM), reference, ranks)


def require_same(layout, reference, ranks):
    folder, student, teacher, single = reference
    results = ranks.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))


@pytest.fixture(scope="module")
def with_experts(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    student, teacher = make_latent_pair(folder)
    layout = SINGLE.with_flags(MOVED)
    (single,) = ranks.run(run_layout, 1, layout, student, teacher, folder / "single", UPDATES)
    return folder, student, teacher, single


@pytest.mark.parametrize("layout", LATENT_LAYOUTS, ids=lambda layout: layout.name)
def test_experts_behind_latent_attention(layout, with_experts, ranks):
    """The correction biases move in every update, and are among the compared tensors."""
    require_same(layout.with_flags(MOVED), with_experts, ranks)
