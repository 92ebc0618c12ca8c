"""A small model in SmolVLM's Hugging Face format: layers of SmolLM2, a new vision tower, a connector."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.pruning.cut import without_block, without_middle
from tools.vlm.emoji_pictures import SIDE

IMAGE, FRAME, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
NEW_TOKENS = (IMAGE, FRAME, WHOLE, END)
TEMPLATE = (  # SmolVLM's
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class VLMSizes:
    """Sizes of a teacher. A picture has 64 x 64 pixels."""

    text_layers: int = 4  # of SmolLM2's 30
    vocabulary: int = 8192  # its most frequent tokens, and those of images
    tower_layers: int = 4
    tower_hidden: int = 192
    patch: int = 16  # pixels: 4 x 4 patches
    merge: int = 4  # 4 x 4 patches make one token: a picture is one token


def make_vlm(language_model: Path, out: Path, sizes: VLMSizes, seed: int, dtype=torch.float32) -> None:
    """Write the model: first and last layers of `language_model` (Llama), tower and connector random."""
    torch.manual_seed(seed)
    llama = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    rows = llama.model.embed_tokens.weight[: sizes.vocabulary - len(NEW_TOKENS)]
    new = rows.mean(0) + rows.std(0) * torch.randn(len(NEW_TOKENS), rows.size(1)) / 2
    kept = without_middle(llama.config.num_hidden_layers, sizes.text_layers)
    text = llama.config.to_dict() | dict(num_hidden_layers=len(kept), vocab_size=sizes.vocabulary)
    for key in ("architectures", "layer_types", "bos_token_id", "eos_token_id", "pad_token_id"):
        text.pop(key, None)
    tokens = {token: len(rows) + number for number, token in enumerate(NEW_TOKENS)}
    config = SmolVLMConfig(
        text_config=text | dict(pad_token_id=2),
        vision_config=dict(
            hidden_size=sizes.tower_hidden,
            intermediate_size=4 * sizes.tower_hidden,
            num_hidden_layers=sizes.tower_layers,
            num_attention_heads=sizes.tower_hidden // 64,
            image_size=SIDE,
            patch_size=sizes.patch,
        ),
        scale_factor=sizes.merge,
        image_token_id=tokens[IMAGE],
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    model = SmolVLMForConditionalGeneration(config)
    with torch.no_grad():
        model.model.text_model.embed_tokens.weight.copy_(torch.cat([rows, new]))
    for number, layer in enumerate(kept):
        model.model.text_model.layers[number].load_state_dict(llama.model.layers[layer].state_dict())
    model.model.text_model.norm.load_state_dict(llama.model.norm.state_dict())
    model.generation_config.eos_token_id = tokens[END]
    model.to(dtype).save_pretrained(out, max_shard_size="50MB")
    edge = {"longest_edge": SIDE}
    SmolVLMImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False).save_pretrained(out)
    write_tokenizer(language_model, out, tokens)


def write_tokenizer(source: Path, out: Path, new_tokens: dict[str, int]) -> None:
    """Write the tokenizer of `source` with the ids below those of `new_tokens`, and these.

    The ids of a byte-pair tokenizer are in the order of its merges, so that the first ones are a complete
    tokenizer.
    """
    described = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    size, model = min(new_tokens.values()), described["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    for token, number in new_tokens.items():
        described["added_tokens"].append({"id": number, "content": token, **flags})
    (out / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["eos_token"] = END
    settings["additional_special_tokens"] = list(new_tokens)
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def load_vlm(folder: Path, dtype=torch.float32, device: str = "cpu") -> nn.Module:
    """Return the model in `folder` as transformers runs it."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval().to(device)


def cut_vlm(teacher: Path, out: Path, text_layers: int, tower_layers: int) -> None:
    """Write the student: of text model and tower the first layer and the last ones.

    A trained teacher of 4 text layers lost 3.0 nats without its second layer, and 14.1 without its third.
    """
    model, config = load_vlm(teacher), AutoConfig.from_pretrained(teacher)
    text, vision = config.text_config, config.vision_config
    kept_text = without_block(text.num_hidden_layers, 1, text.num_hidden_layers - text_layers)
    kept_vision = without_block(vision.num_hidden_layers, 1, vision.num_hidden_layers - tower_layers)
    text.num_hidden_layers, vision.num_hidden_layers = text_layers, tower_layers
    text.layer_types = None
    cut = SmolVLMForConditionalGeneration(config)
    sources, state = model.state_dict(), cut.state_dict()
    for name in state:
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            kept = kept_text if "text_model" in parts else kept_vision
            parts[at] = str(kept[int(parts[at])])
        state[name] = sources[".".join(parts)]
    cut.load_state_dict(state)
    cut.generation_config = model.generation_config
    cut.save_pretrained(out, max_shard_size="50MB")
    for name, path in HFAssets.of(teacher).files().items():
        if name not in ("config.json", "generation_config.json"):
            shutil.copyfile(path, out / name)


def num_parameters(folder: Path) -> dict[str, int]:
    """Return the parameters of the text model, the tower and the connector in `folder`."""
    with torch.device("meta"):
        model = SmolVLMForConditionalGeneration(AutoConfig.from_pretrained(folder)).model
    parts = {"text": model.text_model, "tower": model.vision_model, "connector": model.connector}
    return {name: sum(one.numel() for one in part.parameters()) for name, part in parts.items()}


def num_image_tokens(config: SmolVLMConfig) -> int:
    """Return the tokens of a picture."""
    return (SIDE // config.vision_config.patch_size // config.scale_factor) ** 2


def prompt_ids(folder: Path, question: str, image_tokens: int) -> tuple[list[int], Any]:
    """Return the ids of a question about one picture, up to the answer, and the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    framed = f"{FRAME}{WHOLE}{IMAGE * image_tokens}{FRAME}"
    return tokenizer(text.replace(IMAGE, framed), add_special_tokens=False)["input_ids"], tokenizer
