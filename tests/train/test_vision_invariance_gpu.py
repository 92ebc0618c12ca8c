"""Models with images on GPUs: one GPU against a CPU, two GPUs against one, in fp32 and bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.tiny_vision_models import make_vision_model
from tests.train.invariance import OVERLAP, PARTS, SP, Layout, add_text, errors_of
from tests.train.test_invariance_gpu import BF16_COSINE, BF16_LOSS_TOLERANCE, FP32_TOLERANCE, cosine
from tests.train.vision_invariance import ALL_PARTS, RECOMPUTED, run_vision_layout

pytestmark = pytest.mark.gpu
SINGLE = Layout("one process", flags=ALL_PARTS)
LAYOUTS = (
    Layout("TP2", 2, tp=2),
    Layout("TP2 + SP", 2, tp=2, flags=SP),
    Layout("PP2, units of 2 layers recomputed", 2, pp=2, flags=(*RECOMPUTED, "2")),
    Layout("CP2", 2, cp=2),
    Layout("DP2 + overlapped communication", 2, flags=OVERLAP),
)


def make_wide_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen3-VL student and a Qwen2.5-VL teacher whose heads of 64 channels every kernel accepts."""
    common = dict(rope_type="default", rope_theta=1e4)
    deep = dict(num_hidden_layers=8, hidden_size=128, head_dim=64)
    deep |= dict(rope_parameters=common | dict(mrope_section=[16, 8, 8], mrope_interleaved=True))
    wide = dict(num_hidden_layers=8, hidden_size=256, vocab_size=330)
    wide |= dict(rope_parameters=common | dict(mrope_section=[8, 12, 12]))
    student = make_vision_model(folder / "student", "qwen3_vl", seed=1, text=deep)
    tower = dict(hidden_size=48)
    return add_text(student), make_vision_model(
        folder / "teacher", "qwen2_5_vl", seed=2, text=wide, vision=tower
    )


def make_wide_expert_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen3.5 student and a Qwen3-VL teacher, both with experts, with heads of 64 channels."""
    common = dict(rope_type="default", rope_theta=1e4, mrope_interleaved=True)
    deep = dict(num_hidden_layers=4, hidden_size=128, head_dim=64)
    rope = dict(partial_rotary_factor=0.5, mrope_section=[6, 5, 5])
    deep |= dict(rope_parameters=common | rope, linear_key_head_dim=32, linear_value_head_dim=32)
    wide = dict(num_hidden_layers=4, hidden_size=256, head_dim=64, vocab_size=330)
    wide |= dict(rope_parameters=common | dict(mrope_section=[16, 8, 8]))
    student = make_vision_model(folder / "student", "qwen3_5_moe", seed=1, text=deep)
    tower = dict(hidden_size=48)
    return add_text(student), make_vision_model(
        folder / "teacher", "qwen3_vl_moe", seed=2, text=wide, vision=tower
    )


@pytest.mark.parametrize("make_pair", [make_wide_pair, make_wide_expert_pair])
def test_a_gpu_equals_a_cpu(make_pair, ranks, gpu_ranks, tmp_path):
    pair = make_pair(tmp_path)
    (single,) = ranks.run(run_vision_layout, 1, SINGLE, *pair, tmp_path / "single")
    found = gpu_ranks.run(run_vision_layout, 1, SINGLE, *pair, tmp_path / "layout")
    errors = errors_of(found, tmp_path, single)
    assert all(errors[part] <= FP32_TOLERANCE for part in PARTS), errors


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def reference(request, gpu_ranks, tmp_path_factory):
    """Return (flags, folder, pair, sums of one GPU)."""
    folder = tmp_path_factory.mktemp(f"vision_{request.param}")
    pair, flags = make_wide_pair(folder), ("--bf16",) if request.param == "bf16" else ()
    (single,) = gpu_ranks.run(run_vision_layout, 1, SINGLE.with_flags(flags), *pair, folder / "single")
    return flags, folder, pair, single


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_two_gpus_equal_one(layout, reference, gpu_ranks):
    flags, folder, pair, single = reference
    skip_unless_gpus_take(layout.ranks)
    layout = layout.with_flags(ALL_PARTS + flags)
    errors = errors_of(gpu_ranks.run(run_vision_layout, 2, layout, *pair, folder / "layout"), folder, single)
    if flags:
        errors["cosine"] = cosine(folder / "layout" / "gradients", folder / "single" / "gradients")
        assert errors["cosine"] >= BF16_COSINE, errors
    print(layout.name, {name: value for name, value in errors.items() if name != "where"})
    for part in ("loss", "evaluation") if flags else PARTS:
        assert errors[part] <= (BF16_LOSS_TOLERANCE if flags else FP32_TOLERANCE), f"{part}: {errors}"
