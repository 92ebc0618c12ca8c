"""Tiny random Hugging Face models of every family, made by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

# 3 groups of 2 heads: at TP=2 and TP=4 both the groups and the 300 vocabulary rows need padding
SIZES = dict(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    intermediate_size=64,
    vocab_size=300,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VARIANTS = {
    "llama": ("llama", {}),
    "llama_biases_tied": ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "mistral": ("mistral", {}),
    "qwen2_tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "phi3": ("phi3", {}),
}


def save_tiny(variant: str, folder: Path, max_shard_size: str = "60KB", dtype: torch.dtype = torch.float32) -> Path:
    """Save one variant of `VARIANTS` with random weights (biases and norms included) to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = VARIANTS[variant]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **extra))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved model, by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
