"""Random named pictures and a tiny model that reads them, for tests without downloads."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from PIL import Image

from tests.tiny_models import add_tokenizer
from tools.vlm.emoji_pictures import SIDE, STYLES, Named
from tools.vlm.small_vlm import VLMSizes, make_vlm

SIZES = VLMSizes(text_layers=3, vocabulary=290, tower_layers=3, tower_hidden=64)
NAMES = ("the dog", "brown fox", "fox", "lazy fox", "red cup", "cup", "quick cup", "blue dog")


def write_pictures(folder: Path) -> list[Named]:
    """Write random pictures in both styles; two groups."""
    generator = torch.Generator().manual_seed(0)
    named = [
        Named(name, ("animals", "things")["cup" in name], f"{number}.png")
        for number, name in enumerate(NAMES)
    ]
    for style in STYLES:
        (folder / style).mkdir(parents=True)
        for one in named:
            pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / style / one.file)
    return named


def make_tiny(folder: Path, sizes: VLMSizes = SIZES) -> Path:
    """Write a tiny model with random weights and return its folder."""
    text = folder / "text"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(text)
    add_tokenizer(text)
    make_vlm(text, folder / "vlm", sizes, seed=1)
    return folder / "vlm"
