"""Check adapters on weights in NF4: a run on the rounded model, whatever the layout."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, run_main
from tests.train.invariance import FULL, SINGLE, SP, TOLERANCE, Layout, add_text
from tests.train.lora_run import ALPHA, RANK, run_lora, worst_error

NF4 = ("--lora-base", "nf4")
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    return dequantize_4bit(codes, state)


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """Train on the rounded model, made tensor by tensor."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("nf4")
    student = add_text(make_model(folder / "student", "qwen2", seed=1, **SIZES))
    teacher = make_model(folder / "teacher", "llama", seed=2, hidden_size=72, num_hidden_layers=8)
    rounded = shutil.copytree(student, folder / "rounded")
    for file in rounded.glob("*.safetensors"):
        tensors = {
            name: round_trip(one) if name.endswith("_proj.weight") else one
            for name, one in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    (single,) = ranks.run(run_lora, 1, SINGLE, rounded, teacher, folder / "single")
    return folder, (student, teacher), single


@pytest.mark.parametrize(
    "layout",
    [
        SINGLE,
        Layout("TP2 + SP, full recomputation", 2, tp=2, flags=SP + FULL),
        pytest.param(Layout("PP2", 2, pp=2), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_adapters_learn_as_on_the_rounded_model(layout, reference, ranks):
    folder, pair, single = reference
    results = ranks.run(run_lora, layout.ranks, layout.with_flags(NF4), *pair, folder / "layout")
    for part in ("sums", "evaluation", "last"):
        for name in ("loss", "ce", "kd"):
            assert results[0][part][name] == pytest.approx(single[part][name], rel=TOLERANCE)
    for part in ("gradients", "updated", "merged"):
        error, where = worst_error(folder / "layout" / part, folder / "single" / part)
        assert error <= TOLERANCE, (part, where)


def test_a_checkpoint_exports_the_rounded_model_with_adapters(reference, ranks):
    """The run and `mkd export` write the same bytes: rounded weights, adapters added."""
    folder, (student, teacher), _ = reference
    add_tokenizer(teacher)
    lora = "--lora-rank", str(RANK), "--lora-alpha", str(ALPHA), *NF4, "--export-hf", str(folder / "out")
    argv = flags(folder, "run", *lora, data_path="student/text.txt", save="saved")
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    again = "--load", folder / "saved", "--hf-out", folder / "again", "--reference-hf", student
    (result,) = run_main(ranks, list(map(str, again)), command="mkd.commands.export")
    assert result.exit_code == 0, result.stderr
    ours, theirs = all_tensors(folder / "out"), all_tensors(folder / "again")
    assert [name for name, one in ours.items() if not torch.equal(one, theirs[name])] == []
    rounded = all_tensors(folder / "rounded")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert 0 < (ours[name] - rounded[name]).abs().max() < 0.1 * rounded[name].abs().max()
