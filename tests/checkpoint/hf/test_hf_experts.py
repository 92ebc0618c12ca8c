"""Check that processes read only the slices of their experts, and export the bytes of the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.hf.test_hf_quantised import FP8, dequantised, fp8
from tests.tiny_models import VARIANTS, make_model


def round_trip(source, out, expert_parallel, pipeline_parallel=1, tensor_parallel=1):
    """Load `source` with its experts spread over processes and export it to `out`; return the bytes read."""
    from mkd.checkpoint.hf.hf_assets import HFAssets
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.checkpoint.hf.hf_writer import export_hf
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    context = ParallelContext.create(
        detect(), Sizes(expert=expert_parallel, pipeline=pipeline_parallel, tensor=tensor_parallel)
    )
    shape, checkpoint = ModelShape.from_hf_dir(source), HFCheckpoint(source)
    options = ModelOptions(dtype=torch.bfloat16, sequence_parallel=True)
    layout = PipelineLayout.even(shape.num_layers, pipeline_parallel)
    (model,) = build_model_parts(shape, layout, options, context)
    load_hf_weights(model, shape, checkpoint, context, model.first_layer)
    export_hf([(model, model.first_layer)], shape, out, context=context, assets=HFAssets.of(source))
    return checkpoint.bytes_read


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


BIAS = "e_score_correction_bias"


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek-experts", "moonlight-experts"]
)
def test_an_export_has_the_bytes_of_its_source(family, ranks, tmp_path):
    """Correction biases are fp32 in every checkpoint, all other tensors are bf16."""
    source = make_model(tmp_path / "source", family, dtype=torch.bfloat16, shard_size="1GB")
    expected, read = tensors(source), {}
    assert all(tensor.dtype == torch.bfloat16 for tensor in expected.values())
    biases = {name: torch.rand(len(tensor)) for name, tensor in expected.items() if name.endswith(BIAS)}
    expected |= biases
    save_file(expected, source / "model.safetensors", {"format": "pt"})
    assert bool(biases) == (family in VARIANTS)
    experts = sum(t.nbytes for name, t in expected.items() if ".experts." in name)
    for world, layout in ((1, (1,)), (2, (2,)), (4, (4, 1, 2)), (4, (2, 2))):
        out = tmp_path / f"out{world}{len(layout)}"
        read[world, layout] = ranks.run(round_trip, world, source, out, *layout)
        found = tensors(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (everything,) = read[1, (1,)]
    assert read[2, (2,)] == [everything - experts // 2] * 2


def save_quantised(folder: Path) -> Path:
    """Save a GPT-OSS model whose experts' matrices are random MXFP4 blocks, as released ones."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    make_model(folder, "gpt_oss", dtype=torch.bfloat16, shard_size="1GB", **sizes)
    generator, stored = torch.Generator().manual_seed(0), tensors(folder)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks, scales = (experts, outputs, inputs // 32, 16), (experts, outputs, inputs // 32)
        stored[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
        stored[f"{name}_scales"] = torch.randint(117, 124, scales, dtype=torch.uint8, generator=generator)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantisation = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder


def test_quantised_experts_are_those_of_transformers(ranks, tmp_path):
    """Each of two processes reads the blocks of its experts, and the export is what transformers loads."""
    from transformers import AutoModelForCausalLM

    source, out = save_quantised(tmp_path / "source"), tmp_path / "out"
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    (everything,) = ranks.run(round_trip, 1, source, tmp_path / "alone", 1)
    experts = sum(t.nbytes for name, t in tensors(source).items() if ".experts." in name)
    assert ranks.run(round_trip, 2, source, out, 2) == [everything - experts // 2] * 2
    found = tensors(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_quantised_blocks_of_experts(ranks, tmp_path):
    """DeepSeek-V3's FP8 blocks, with experts over two processes: the export has the dequantised tensors."""
    source = make_model(tmp_path / "source", "deepseek-experts", dtype=torch.bfloat16, shard_size="1GB")
    block, expected, stored = (16, 32), tensors(source), {}
    for seed, (name, tensor) in enumerate(sorted(expected.items())):
        if tensor.dim() == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
            values, scales = fp8(*tensor.shape, block, seed)
            stored |= {name: values, f"{name}_scale_inv": scales}
            expected[name] = dequantised(values, scales, block).bfloat16()
        else:
            stored[name] = expected[name] = tensor.float() if name.endswith(BIAS) else tensor
    assert sum(".mlp.experts." in name for name in stored) == 3 * 8 * 3 * 2  # layers, experts, matrices
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = FP8 | {"weight_block_size": list(block)}
    (source / "config.json").write_text(json.dumps(config))
    ranks.run(round_trip, 2, source, tmp_path / "out", 2)
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
