"""Pretraining of a vision tower: it learns to match pictures with names.

Contrastive, as CLIP (Radford et al. 2021, arXiv 2103.00020), with a frozen text side, as LiT (Zhai et al. 2022,
arXiv 2111.07991). The text side is the text model's own table of embeddings, and nothing stands between it and
the connector: a picture becomes a token that the text model reads like a word.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from tools.vlm.emoji_pictures import Named, varied
from tools.vlm.small_vlm import load_vlm

BATCH, WARMUP, TEMPERATURE = 64, 20, 0.05


def pretrain_tower(
    folder: Path,
    pixels: Tensor,  # [n, 3, 64, 64] fp32
    named: Sequence[Named],  # n
    num_pictures: int,
    *,
    seed: int,
    lr: float = 1e-3,
    device: str = "cpu",
) -> float:
    """Train tower and connector of the model in `folder` on `num_pictures`, and return the last loss.

    The text model does not change. All names are compared at once, so that chance is the logarithm of their
    number. The connector is scaled at the end: image tokens are then as large as embeddings.
    """
    generator = torch.Generator().manual_seed(seed)
    model = load_vlm(folder, device=device).requires_grad_(False)
    pixels, names = pixels.to(device), F.normalize(name_vectors(folder, model, named))
    inner = model.model
    parts = (inner.vision_model, inner.connector)
    parameters = [parameter.requires_grad_() for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05)
    steps, begin, loss = max(1, num_pictures // BATCH), time.perf_counter(), torch.zeros(())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / WARMUP) * cosine(step / steps)
        chosen = torch.randint(len(named), (BATCH,), generator=generator).to(device)
        vectors = F.normalize(image_tokens(inner, varied(pixels[chosen], generator)).mean(1))
        loss = F.cross_entropy(vectors @ names.T / TEMPERATURE, chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if (step + 1) % max(1, steps // 5) == 0:
            speed = (step + 1) * BATCH / (time.perf_counter() - begin)
            text = f"tower: step {step + 1} of {steps}, loss {loss:.2f}, {speed:.0f} pictures/s"
            print(f"{text} (chance {math.log(len(named)):.2f})", flush=True)
    with torch.no_grad():
        size = image_tokens(inner, pixels[:BATCH]).pow(2).mean().sqrt()
        inner.connector.modality_projection.proj.weight.mul_(
            model.get_input_embeddings().weight.pow(2).mean().sqrt() / size
        )
    model.cpu().save_pretrained(folder, max_shard_size="50MB")
    return float(loss)


def cosine(done: float) -> float:
    """Return the share of the learning rate after the share `done` of the steps."""
    return (1 + math.cos(math.pi * done)) / 2


def image_tokens(inner: nn.Module, pixels: Tensor) -> Tensor:
    """Return what the text model reads of pictures, [n, image tokens, hidden]."""
    return inner.connector(inner.vision_model(pixel_values=pixels).last_hidden_state)


def name_vectors(folder: Path, model: nn.Module, named: Sequence[Named]) -> Tensor:
    """Return the embeddings of each name's tokens, centred and added up, [n, hidden].

    The weights are 1, 1/2, 1/3, ...: the token that the answer starts with counts most.
    """
    tokenizer, table = AutoTokenizer.from_pretrained(folder), model.get_input_embeddings().weight.detach()
    vectors = []
    for one in named:
        ids = tokenizer(f" {one.name}", add_special_tokens=False)["input_ids"]
        weights = 1 / torch.arange(1, len(ids) + 1, device=table.device)
        vectors.append(weights @ (table[ids] - table.mean(0)))
    return torch.stack(vectors)
