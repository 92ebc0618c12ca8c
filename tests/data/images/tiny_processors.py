"""Folders of tiny vision-language models without weights, and pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import transformers
from PIL import Image

from tests.tiny_models import add_tokenizer

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLVLM_TEMPLATE = (  # reads lists of parts only, as SmolVLM's own does
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
    "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'image' %}<image>{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEXT_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TEXT_SIZES |= dict(num_key_value_heads=2, vocab_size=400, max_position_embeddings=512)
QWEN_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
SMOLVLM_TOKENS = [
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
]
SMOLVLM_TOKENS += [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
TILE, PATCH = 32, 8


def make_smolvlm(
    folder: Path, tiles: int = 2, kind: str = "SmolVLM", special: Sequence[str] = SMOLVLM_TOKENS
) -> Path:
    """Write a SmolVLM folder: images become up to `tiles` x `tiles` tiles and a small one, 4 tokens each."""
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=dict(**vision, image_size=TILE, patch_size=PATCH),
        text_config=dict(**TEXT_SIZES, model_type="llama"),
        scale_factor=2,
    )
    edges = {"size": {"longest_edge": tiles * TILE}, "max_image_size": {"longest_edge": TILE}}
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**edges)
    return _write(folder, config, processor, special, SMOLVLM_TEMPLATE)


def make_qwen(folder: Path, kind: str = "Qwen2_5_VL", most_pixels: int = 64 * 64) -> Path:
    """Write a Qwen-VL folder: 4 x 4 pixels a patch, 2 x 2 patches a token."""
    vision = dict(patch_size=4, spatial_merge_size=2, depth=2, hidden_size=16, num_heads=2)
    config = getattr(transformers, f"{kind}Config")(text_config=dict(TEXT_SIZES), vision_config=vision)
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": most_pixels}
    )
    return _write(folder, config, processor, QWEN_TOKENS, QWEN_TEMPLATE)


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image_file(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    """Return the pixels as an image file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def _write(folder: Path, config, processor, special: Sequence[str], template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    add_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config.image_token_id = tokenizer.convert_tokens_to_ids(
        "<image>" if "<image>" in special else "<|image_pad|>"
    )
    config.save_pretrained(folder)
    return folder
