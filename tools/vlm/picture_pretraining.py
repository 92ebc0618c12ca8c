"""Pretraining on named pictures: the tower learns to match names, then all parts learn to write them.

Matching is contrastive, as CLIP (Radford et al. 2021, arXiv 2103.00020), with a frozen text side, as LiT
(Zhai et al. 2022, arXiv 2111.07991). The text side is the text model's own table of embeddings, and nothing
stands between it and the connector: a picture becomes a token that the text model reads like a word.
Captions are the tokens of a picture and then its name, without a conversation around them: short rows in
which nothing but the picture tells what follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from tools.vlm.emoji_pictures import Named, varied
from tools.vlm.small_vlm import END, load_vlm

WARMUP, TEMPERATURE, IGNORED = 20, 0.05, -100
Batch = tuple[Tensor, Tensor]  # pictures [b, 3, 64, 64], their numbers [b] int64


def pretrain(
    folder: Path,
    pixels: Tensor,  # [n, 3, 64, 64] fp32
    named: Sequence[Named],  # n
    num_matched: int,
    num_captions: int,
    *,
    seed: int,
    batch_size: int = 64,
    lr: float = 1e-3,
    device: str = "cpu",
) -> tuple[float, float]:
    """Train the model in `folder` on so many pictures; return the last losses of matching and of captions."""
    generator = torch.Generator().manual_seed(seed)
    model = load_vlm(folder, device=device)
    pixels = pixels.to(device)

    def batch() -> Batch:
        chosen = torch.randint(len(named), (batch_size,), generator=generator).to(device)
        return varied(pixels[chosen], generator), chosen

    matched = match_names(folder, model, named, batch, num_matched // batch_size, lr)
    written = write_names(folder, model, named, batch, num_captions // batch_size, lr / 2)
    model.cpu().save_pretrained(folder, max_shard_size="50MB")
    return matched, written


def match_names(
    folder: Path, model: nn.Module, named: Sequence[Named], batch: Callable[[], Batch], steps: int, lr: float
) -> float:
    """Train tower and connector to match pictures with names, all names at once; return the last loss.

    The connector is scaled at the end: image tokens are then as large as embeddings.
    """
    inner, names = model.model, F.normalize(name_vectors(folder, model, named))

    def loss_of(pixels: Tensor, chosen: Tensor) -> Tensor:
        vectors = F.normalize(image_tokens(inner, pixels).mean(1))
        return F.cross_entropy(vectors @ names.T / TEMPERATURE, chosen)

    parts = (inner.vision_model, inner.connector)
    found = _train(f"matching (chance {math.log(len(named)):.2f})", parts, loss_of, batch, steps, lr)
    with torch.no_grad():
        size, table = image_tokens(inner, batch()[0]).pow(2).mean(), model.get_input_embeddings().weight
        inner.connector.modality_projection.proj.weight.mul_((table.pow(2).mean() / size).sqrt())
    return found


def write_names(
    folder: Path, model: nn.Module, named: Sequence[Named], batch: Callable[[], Batch], steps: int, lr: float
) -> float:
    """Train all parts to write the name after the tokens of a picture; return the last loss, per token."""
    labels = name_tokens(folder, named).to(model.device)

    def loss_of(pixels: Tensor, chosen: Tensor) -> Tensor:
        expected = labels[chosen]
        logits = caption_logits(model, pixels, expected.clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=IGNORED)

    return _train("captions", (model,), loss_of, batch, steps, lr)


def _train(
    name: str,
    parts: Sequence[nn.Module],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batch: Callable[[], Batch],
    steps: int,
    lr: float,
) -> float:
    """Train the parameters of `parts`, and return the last loss."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05)
    begin, seen, loss = time.perf_counter(), 0, torch.tensor(torch.nan)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / WARMUP) * cosine(step / steps)
        pixels, chosen = batch()
        loss, seen = loss_of(pixels, chosen), seen + len(chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if (step + 1) % max(1, steps // 5) == 0:
            speed = seen / (time.perf_counter() - begin)
            print(f"{name}: step {step + 1} of {steps}, loss {loss:.2f}, {speed:.0f} pictures/s", flush=True)
    return float(loss)


def cosine(done: float) -> float:
    """Return the share of the learning rate after the share `done` of the steps."""
    return (1 + math.cos(math.pi * done)) / 2


def image_tokens(inner: nn.Module, pixels: Tensor) -> Tensor:
    """Return what the text model reads of pictures, [n, image tokens, hidden]."""
    return inner.connector(inner.vision_model(pixel_values=pixels).last_hidden_state)


def caption_logits(model: nn.Module, pixels: Tensor, ids: Tensor) -> Tensor:
    """Return the logits of the tokens `ids` [n, m] after those of the pictures, [n, m, vocabulary]."""
    shown = image_tokens(model.model, pixels)
    row = torch.cat([shown, model.get_input_embeddings()(ids[:, :-1])], dim=1)
    hidden = model.model.text_model(inputs_embeds=row, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, shown.size(1) - 1 :])


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


def name_tokens(folder: Path, named: Sequence[Named]) -> Tensor:
    """Return the ids of each name and the end of the turn, [n, m] int64, IGNORED beyond it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(f" {one.name}{END}", add_special_tokens=False)["input_ids"] for one in named]
    rows = torch.full((len(ids), max(map(len, ids))), IGNORED)
    for row, own in zip(rows, ids, strict=True):
        row[: len(own)] = torch.tensor(own)
    return rows
