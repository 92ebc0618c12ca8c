"""Check the invariance table of models with experts; balance losses are on in every row."""

from __future__ import annotations

import pytest

from tests.train.invariance import TOLERANCE, Layout, build_layout, errors_of, require_equal, run_layout
from tests.train.moe_invariance import BALANCE, LAYOUTS, make_moe_pair

UPDATES = 2  # the table has more
QUICK = {
    "EP2 DP4, distributed optimizer, teacher EP4",
    "EP2 PP2 VPP2, one layer of two recomputed",
    "EP2 TP2 PP2 + SP, experts recomputed",
    "EP2 CP2 DP2 + overlapped communication",
}


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe_invariance")
    pair = make_moe_pair(folder)
    single = Layout("one process", flags=BALANCE)
    (sums,) = ranks.run(run_layout, 1, single, *pair, folder / "single", UPDATES)
    for name in ("moe_balance", "moe_z"):
        assert sums["sums"] is not None and sums["last"][f"auxiliary_loss/{name}"] > 0
    return folder, pair, sums


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, id=one.name, marks=[] if one.name in QUICK else pytest.mark.slow) for one in LAYOUTS],
)
def test_layout_equals_one_process(layout, reference, ranks):
    folder, pair, single = reference
    layout = layout.with_flags(BALANCE)
    results = ranks.run(run_layout, layout.ranks, layout, *pair, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))
    ours, theirs = results[0]["last"], single["last"]
    for name in ("auxiliary_loss/moe_balance", "auxiliary_loss/moe_z"):
        assert ours[name] == pytest.approx(theirs[name], rel=TOLERANCE)


def clipped(layout, student, teacher):
    """Return the number of gradients in each call that clips them."""
    from mkd.train import optimizer
    from mkd.train.step import train_step

    engine, _, batches = build_layout(layout, layout.argv(student, teacher))
    numbers, clip = [], optimizer.clip_grad_by_total_norm_fp32

    def count(parameters, *limits):
        numbers.append(sum(parameter.grad is not None for parameter in parameters))
        clip(parameters, *limits)

    optimizer.clip_grad_by_total_norm_fp32 = count
    try:
        train_step(engine, batches)
    finally:
        optimizer.clip_grad_by_total_norm_fp32 = clip
    return numbers


def test_nothing_is_clipped_on_a_stage_without_experts(reference, ranks):
    """Transformer Engine's kernels end the process on a list without tensors."""
    _, pair, _ = reference
    layout = next(layout for layout in LAYOUTS if "stage without experts" in layout.name)
    dense, with_experts = ranks.run(clipped, 2, layout, *pair)
    assert len(dense) == 1 and len(with_experts) == 2 and all(dense + with_experts)


def test_the_quick_layouts_are_in_the_table():
    assert {layout.name for layout in LAYOUTS} > QUICK
