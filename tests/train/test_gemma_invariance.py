"""Check rows of the invariance table for a Gemma 4 student and a Gemma 3 teacher.

They have norms behind blocks, windows, ropes by layer and scales; Gemma 4 has heads by layer, keys that are
values, and soft-capped logits.
"""

from __future__ import annotations

import pytest

from tests.tiny_models import make_model
from tests.train.invariance import FULL, SINGLE, SP, Layout, add_text, errors_of, require_equal, run_layout

UPDATES = 2
ADAM = ("--adam-eps", "1e-6")  # see test_latent_invariance.py
LAYOUTS = (
    Layout("TP2 + sequence parallel", 2, tp=2, flags=SP),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("CP2", 2, cp=2),
    Layout("full recomputation", flags=FULL),
    Layout("TP2 PP2 micro-batch 2", 4, tp=2, pp=2, micro=2),
)


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    student = add_text(make_model(folder / "student", "gemma4", seed=1, num_global_key_value_heads=2))
    wider = dict(num_hidden_layers=8, hidden_size=64, head_dim=12, sliding_window=9, vocab_size=330)
    kinds = 2 * (3 * ["sliding_attention"] + ["full_attention"])
    teacher = make_model(folder / "teacher", "gemma3", seed=2, layer_types=kinds, **wider)
    layout = SINGLE.with_flags(ADAM)
    (single,) = ranks.run(run_layout, 1, layout, student, teacher, folder / "single", UPDATES)
    return folder, student, teacher, single


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout, reference, ranks):
    folder, student, teacher, single = reference
    layout = layout.with_flags(ADAM)
    results = ranks.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))
