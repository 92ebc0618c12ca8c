"""Make folders of models whose experts are quantised as released ones, and the same models dequantised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.hf.test_hf_experts import save_quantised
from tests.checkpoint.hf.test_hf_quantised import FP8, dequantised
from tests.tiny_models import make_model

BLOCKS = dict(hidden_size=64, moe_intermediate_size=128, num_hidden_layers=4, mlp_only_layers=[0])


def save(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def fp8_blocks(folder: Path, **sizes: object) -> tuple[Path, Path]:
    """Make a Qwen3-MoE with experts in FP8 with scales of 128 x 128 weights, and its fp32 form.

    Scales are no powers of two, and differ from block to block.
    """
    made = make_model(folder / "made", "qwen3_moe", shard_size="1GB", **BLOCKS | sizes)
    tensors, stored = load_file(made / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            stored[name] = tensor
            continue
        grid = [-(-size // 128) for size in tensor.shape]
        scales = tensor.abs().max() / 448 * (1 + torch.rand(grid, generator=generator))
        full = scales.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)
        values = (tensor / full[:, : tensor.shape[1]]).to(torch.float8_e4m3fn)
        stored |= {name: values, f"{name}_scale_inv": scales}
        tensors[name] = dequantised(values, scales)
    config = json.loads((made / "config.json").read_text())
    plain = save(folder / "plain", config, tensors)
    return save(folder / "blocks", config | {"quantization_config": FP8}, stored), plain


def mxfp4(folder: Path) -> tuple[Path, Path]:
    """Make a GPT-OSS with experts in MXFP4, and its bf16 form as transformers dequantises it."""
    from transformers import AutoModelForCausalLM

    quantised = save_quantised(folder / "mxfp4")
    model = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.bfloat16)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return quantised, save(folder / "plain", config, tensors)


def with_other_experts(folder: Path, source: Path) -> Path:
    """Return a copy of the quantised folder `source` whose experts are not quantised, as config.json says."""
    shutil.copytree(source, folder)
    plain = load_file(source.parent / "plain" / "model.safetensors")
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    return folder
