"""Check the invariance table on GPUs: Transformer Engine's layers, NCCL, fp32 and bf16."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.ranks import skip_unless_gpus_take
from tests.train.invariance import LAYOUTS, PARTS, SINGLE, compare, make_pair, run_layout

pytestmark = pytest.mark.gpu
FP32_TOLERANCE = 1e-4
BF16_LOSS_TOLERANCE, BF16_COSINE = 1e-2, 0.999
HEADS = dict(head_dim=64, hidden_size=128)  # accepted by every attention kernel


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def reference(request, gpu_ranks, tmp_path_factory):
    """Return (precision flags, folder, student, teacher, sums of one GPU)."""
    folder = tmp_path_factory.mktemp(f"invariance_{request.param}")
    student, teacher = make_pair(folder, HEADS)
    flags = ("--bf16",) if request.param == "bf16" else ()
    (single,) = gpu_ranks.run(run_layout, 1, SINGLE.with_flags(flags), student, teacher, folder / "single")
    return flags, folder, student, teacher, single


def cosine(ours, theirs) -> float:
    """Return the cosine between all gradients, each side as one vector."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    dot = sum((ours[name].double() * theirs[name].double()).sum() for name in theirs)
    norms = [
        sum(tensor.double().square().sum() for tensor in tensors.values()).sqrt()
        for tensors in (ours, theirs)
    ]
    return float(dot / (norms[0] * norms[1]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_gpu(layout, reference, gpu_ranks):
    flags, folder, student, teacher, single = reference
    skip_unless_gpus_take(layout.ranks)
    errors = compare(layout.with_flags(flags), gpu_ranks, student, teacher, folder, single)
    if flags:
        errors["cosine"] = cosine(folder / "layout" / "gradients", folder / "single" / "gradients")
        assert errors["cosine"] >= BF16_COSINE, errors
    print(layout.name, " ".join(flags), {name: value for name, value in errors.items() if name != "where"})
    for part in ("loss", "evaluation") if flags else PARTS:
        assert errors[part] <= (BF16_LOSS_TOLERANCE if flags else FP32_TOLERANCE), f"{part}: {errors}"
