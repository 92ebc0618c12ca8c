"""Tensors of a Hugging Face folder that mkd neither runs nor trains, and that an export copies.

They are layers that predict further tokens, and the tower of a model whose text alone mkd trains, see
`carried_patterns`. Reading a model skips them. An export takes them from the folder that gives its
config.json. DeepSeek's and GLM's layers hold copies of embedding and head: there it writes the trained ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_assets import INDEX_FILE, SINGLE_FILE
from mkd.checkpoint.hf.hf_names import EXTRA_LAYERS, carried_names, carried_patterns
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_shards import DTYPES, CarriedTensor
from mkd.errors import CheckpointError
from mkd.families.weight_rules import EMBEDDING, LM_HEAD
from mkd.plan.models.model_shape import ModelShape

LOG = logging.getLogger("mkd")

NUM_FURTHER = (*EXTRA_LAYERS, "mtp_num_hidden_layers")  # keys of config.json with the number of such layers
VISUAL = "model.visual.", "model.vision_tower."  # starts of the names of a tower
COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": LM_HEAD}  # names in such a layer


def find_carried(shape: ModelShape, folder: Path) -> dict[str, CarriedTensor]:
    """Return the tensors that an export of a model copies from `folder`; none if it has no weights.

    They keep their bytes. A tensor that the folder's config.json describes as quantised is dequantised.
    Raises `CheckpointError`s for weights that cannot be opened, and for a dtype that torch does not have.
    """
    if not carried_patterns(shape):
        return {}
    checkpoint = HFCheckpoint(folder) if has_weights(folder) else None
    found = {} if checkpoint is None else dict(_carried(shape, checkpoint))
    parts = shape.hf_config, shape.hf_config.get("text_config") or {}
    has_further = any(part.get(name) for part in parts for name in NUM_FURTHER)
    has_tower = shape.vision is None and shape.hf_config.get("vision_config")
    do = "name the original model with --reference-hf to copy what is missing"
    lost = {
        "layers that predict further tokens": has_further and not any(map(predicts_further, found)),
        "vision tower": has_tower and not any(name.startswith(VISUAL) for name in found),
    }
    for thing in (thing for thing, is_lost in lost.items() if is_lost):
        LOG.warning("the export has no %s: there are no such tensors in %s; %s", thing, folder, do)
    if checkpoint is None and not any(lost.values()):  # not every config.json says what the model has
        patterns = ", ".join(carried_patterns(shape))
        LOG.warning(
            "the export has no %s, as %s has no weights; if the model has them, %s", patterns, folder, do
        )
    return found


def carried_bytes(shape: ModelShape, folder: Path) -> int:
    """Return the bytes of the tensors that `find_carried` finds; it raises the same errors."""
    if not (carried_patterns(shape) and has_weights(folder)):
        return 0
    found = (one for _, one in _carried(shape, HFCheckpoint(folder)))
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in found)


def has_weights(folder: Path) -> bool:
    """Return True if the folder has weights, not only the small files of a model."""
    return any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def predicts_further(carried: str) -> bool:
    """Return True if a carried tensor belongs to the layers that predict further tokens."""
    return carried.startswith(("mtp.", "model.layers."))


def _carried(shape: ModelShape, checkpoint: HFCheckpoint) -> Iterator[tuple[str, CarriedTensor]]:
    for name in carried_names(shape, checkpoint.headers):
        header = checkpoint.headers[name]
        if header.dtype not in DTYPES:
            what = f"{checkpoint.directory}: tensor {name} is stored as {header.dtype}"
            why = f"an export copies it, and mkd knows {', '.join(DTYPES)}"
            do = "remove the tensor from the folder, or use the original checkpoint of this model"
            raise CheckpointError(what, why, do, code="hf-quantisation-not-supported")
        dtype = DTYPES[header.dtype]
        read = partial(_read, checkpoint, name, dtype)
        yield name, CarriedTensor(header.shape, dtype, read, _copied(shape, name, header.shape))


def _copied(shape: ModelShape, name: str, full: tuple[int, ...]) -> str:
    """Return the name of the trained tensor that a carried one is a copy of; "" if of none."""
    original = COPIES.get(name.split(".", 3)[-1], "") if name.startswith("model.layers.") else ""
    is_copy = original and full == (shape.vocab_size, shape.hidden_size)
    if not is_copy:
        return ""
    return EMBEDDING if shape.tie_word_embeddings else original


def _read(checkpoint: HFCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    return checkpoint.read_whole(name).to(dtype)


def tell_of_skipped(shape: ModelShape, checkpoint: HFCheckpoint) -> None:
    """Warn of the tensors in the folder of a model that mkd does not train."""
    names = carried_names(shape, checkpoint.headers)
    if names:
        patterns = ", ".join(carried_patterns(shape))
        what = f"{len(names)} tensors ({patterns}) are not trained; an export copies them as they are"
        LOG.warning("%s: %s", checkpoint.directory, what)
