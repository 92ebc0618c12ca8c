"""Check cross-tokenizer teachers on GPUs: Transformer Engine's layers, NCCL, fp32 and bf16, vs. one GPU."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train.cross_tokenizer_invariance import LAYOUTS, LOSSES, SINGLE, make_files, run_layout
from tests.train.invariance import PARTS, errors_of
from tests.train.test_invariance_gpu import BF16_COSINE, BF16_LOSS_TOLERANCE, FP32_TOLERANCE, cosine

pytestmark = pytest.mark.gpu
SIZES = dict(head_dim=64, hidden_size=192)  # accepted by every attention kernel
CASES = [(precision, loss) for precision in ("fp32", "bf16") for loss in LOSSES]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def reference(request, gpu_ranks, tmp_path_factory):
    """Return (precision flags, loss, folder, sums of one GPU)."""
    precision, loss = request.param
    files = make_files(tmp_path_factory.mktemp(f"own_tokens_{precision}"), SIZES)
    flags = ("--bf16",) if precision == "bf16" else ()
    (single,) = gpu_ranks.run(run_layout, 1, SINGLE.with_flags(flags), files, loss, files / "single")
    return flags, loss, files, single


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_gpu(layout, reference, gpu_ranks):
    flags, loss, files, single = reference
    skip_unless_gpus_take(layout.ranks)
    results = gpu_ranks.run(run_layout, layout.ranks, layout.with_flags(flags), files, loss, files / "layout")
    errors = errors_of(results, files, single)
    if flags:
        errors["cosine"] = cosine(files / "layout" / "gradients", files / "single" / "gradients")
        assert errors["cosine"] >= BF16_COSINE, errors
    print(
        loss, layout.name, " ".join(flags), {name: value for name, value in errors.items() if name != "where"}
    )
    for part in ("loss", "evaluation") if flags else PARTS:
        assert errors[part] <= (BF16_LOSS_TOLERANCE if flags else FP32_TOLERANCE), f"{part}: {errors}"
