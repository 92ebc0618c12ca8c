"""Check adapters of other families at two layouts: latent attention, mixers, shared experts, images."""

from __future__ import annotations

import pytest

from tests.tiny_models import make_model
from tests.train.invariance import FULL, SINGLE, SP, TOLERANCE, Layout, add_text
from tests.train.lora_run import run_lora, worst_error
from tests.train.test_latent_invariance import ADAM
from tests.train.vision_invariance import LENGTH, make_qwen_pair

EP2 = ("--expert-model-parallel-size", "2")
EXPERTS = "deepseek-experts", "qwen3_5_moe", "gpt_oss", "nemotron_h-experts", "gemma4-experts"
FAMILIES = "deepseek", "gemma3", "phi3", "qwen3_5", *EXPERTS


def compare(ranks, folder, pair, layout, flags, images=False):
    (single,) = ranks.run(run_lora, 1, SINGLE.with_flags(flags), *pair, folder / "single", 2, images)
    run = layout.with_flags(flags)
    results = ranks.run(run_lora, run.ranks, run, *pair, folder / "layout", 2, images)
    for part in ("sums", "evaluation", "last"):
        for name in ("loss", "ce", "kd"):
            assert results[0][part][name] == pytest.approx(single[part][name], rel=TOLERANCE), (part, name)
    for part in ("gradients", "updated", "merged"):
        error, where = worst_error(folder / "layout" / part, folder / "single" / part)
        assert error <= TOLERANCE, (part, where)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, ranks, tmp_path):
    student = add_text(make_model(tmp_path / "student", family, seed=1))
    teacher = make_model(tmp_path / "teacher", "llama", seed=2, num_hidden_layers=8, vocab_size=330)
    flags = SP + FULL + (EP2 if family in EXPERTS else ())
    compare(ranks, tmp_path, (student, teacher), Layout("TP2 + SP", 2, tp=2, flags=flags), ADAM)


@pytest.mark.slow
def test_students_with_images(ranks, tmp_path):
    """The tower, its projector and everything else are frozen."""
    pair = make_qwen_pair(tmp_path)
    compare(ranks, tmp_path, pair, Layout("PP2 CP2", 4, pp=2, cp=2), LENGTH + ADAM, images=True)
