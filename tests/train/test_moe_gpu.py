"""Check models with experts on GPUs: grouped products of Transformer Engine, NCCL, fp32 and bf16."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train.invariance import PARTS, Layout, errors_of, run_layout
from tests.train.moe_invariance import BALANCE, LAYOUTS, make_moe_pair
from tests.train.test_invariance_gpu import BF16_COSINE, BF16_LOSS_TOLERANCE, FP32_TOLERANCE, HEADS, cosine

pytestmark = pytest.mark.gpu
SINGLE = Layout("one process", flags=BALANCE)
UPDATES = 2


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def reference(request, gpu_ranks, tmp_path_factory):
    """Return (precision flags, folder, pair of models, sums of one GPU)."""
    folder = tmp_path_factory.mktemp(f"moe_{request.param}")
    pair = make_moe_pair(folder, HEADS)
    flags = ("--bf16",) if request.param == "bf16" else ()
    (single,) = gpu_ranks.run(run_layout, 1, SINGLE.with_flags(flags), *pair, folder / "single", UPDATES)
    return flags, folder, pair, single


def require_close(errors: dict, folder, flags: tuple) -> None:
    if flags:
        errors["cosine"] = cosine(folder / "layout" / "gradients", folder / "single" / "gradients")
        assert errors["cosine"] >= BF16_COSINE, errors
    print(" ".join(flags), {name: value for name, value in errors.items() if name != "where"})
    for part in ("loss", "evaluation") if flags else PARTS:
        assert errors[part] <= (BF16_LOSS_TOLERANCE if flags else FP32_TOLERANCE), f"{part}: {errors}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_gpu(layout, reference, gpu_ranks):
    flags, folder, pair, single = reference
    skip_unless_gpus_take(layout.ranks)
    layout = layout.with_flags(BALANCE + flags)
    results = gpu_ranks.run(run_layout, layout.ranks, layout, *pair, folder / "layout", UPDATES)
    require_close(errors_of(results, folder, single), folder, flags)


def test_grouped_experts_equal_local_experts(reference, gpu_ranks, ranks):
    """The CPU runs one MLP after another, in fp32."""
    flags, folder, pair, single = reference
    results = ranks.run(run_layout, 1, SINGLE, *pair, folder / "layout", UPDATES)
    require_close(errors_of(results, folder, single), folder, flags)
