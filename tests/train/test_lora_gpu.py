"""Check LoRA students on a GPU, with Transformer Engine's layers, against one process on the CPU."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train.invariance import FULL, SINGLE, SP, Layout, make_pair
from tests.train.lora_run import run_lora, worst_error
from tests.train.test_invariance_gpu import FP32_TOLERANCE, HEADS

pytestmark = pytest.mark.gpu
LAYOUTS = (
    SINGLE,
    Layout("full recomputation", flags=FULL),
    Layout("TP2 + SP", 2, tp=2, flags=SP),
    Layout("PP2", 2, pp=2),
)


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora_gpu")
    pair = make_pair(folder, HEADS)
    (single,) = ranks.run(run_lora, 1, SINGLE, *pair, folder / "single")
    return folder, pair, single


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gradients_are_those_of_the_cpu(layout, reference, gpu_ranks):
    skip_unless_gpus_take(layout.ranks)
    folder, pair, single = reference
    results = gpu_ranks.run(run_lora, layout.ranks, layout, *pair, folder / "layout")
    for name in ("loss", "ce", "kd"):
        assert results[0]["sums"][name] == pytest.approx(single["sums"][name], rel=FP32_TOLERANCE)
    errors = {
        part: worst_error(folder / "layout" / part, folder / "single" / part) for part in ("gradients",)
    }
    print(layout.name, errors)
    assert errors["gradients"][0] <= FP32_TOLERANCE, errors
