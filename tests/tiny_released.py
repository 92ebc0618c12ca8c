"""Make tiny folders of Qwen3.5 as released, with a vision tower and layers that predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from tests.tiny_models import add_tokenizer, make_model

KINDS = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
ROPE = dict(
    rope_type="default",
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
TOWER = dict(depth=2, hidden_size=16, num_heads=2, intermediate_size=24, patch_size=4)
FURTHER = {
    "mtp.fc.weight": torch.randn(48, 96),
    "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 6, 48, dtype=torch.float16),
    "mtp.norm.weight": torch.full((48,), torch.nan).bfloat16(),  # values of what is copied do not matter
}


def make_text_alone(folder: Path, family: str, **options) -> Path:
    """Save the text model on its own, in one file."""
    return make_model(folder, family, shard_size="1GB", rope_parameters=ROPE, **options)


def make_released(folder: Path, text: Path, family: str) -> Path:
    """Save the model in the folder `text` as released: nested, experts in stacks, processor files beside."""
    name, own = KINDS[family], json.loads((text / "config.json").read_text())
    vision = TOWER | dict(out_hidden_size=own["hidden_size"], num_position_embeddings=16)
    config = getattr(transformers, f"{name}Config")(text_config=own, vision_config=vision)
    torch.manual_seed(9)
    tower = getattr(transformers, f"{name}VisionModel")._from_config(config.vision_config)
    texts = load_tensors(text)
    dtype = texts["model.norm.weight"].dtype
    tensors = {f"model.visual.{key}": value.to(dtype) for key, value in tower.state_dict().items()} | FURTHER
    tensors |= {released_name(key): value for key, value in stacked(texts).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["architectures"] = [f"{name}ForConditionalGeneration"]
    content["dtype"] = own["dtype"]
    content["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(content))
    transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2).save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text('{"patch_size": 4}')
    return add_tokenizer(folder)


def released_name(tensor: str) -> str:
    """Return the released name of a tensor of the text model on its own."""
    return tensor.replace("model.", "model.language_model.", 1) if tensor.startswith("model.") else tensor


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with all experts of a layer in two: gate and up, and down."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        start, middle, rest = name.partition(".experts.")
        if not middle:
            found[name] = tensor
            continue
        number, part, _ = rest.split(".")
        experts.setdefault(f"{start}{middle}", {})[int(number), part] = tensor
    for start, own in experts.items():
        rows = {part: [own[e, part] for e in range(len(own) // 3)] for _, part in own}
        gate_up = [torch.cat(both) for both in zip(rows["gate_proj"], rows["up_proj"], strict=True)]
        found |= {
            f"{start}gate_up_proj": torch.stack(gate_up),
            f"{start}down_proj": torch.stack(rows["down_proj"]),
        }
    return found


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
