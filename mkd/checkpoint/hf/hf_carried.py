"""Tensors of a Hugging Face folder that mkd neither runs nor trains, and that an export copies.

They are layers that predict further tokens, and the tower of a model whose text alone mkd trains. A family
names them (`Family.carried`). Reading a model skips them. An export takes them from the folder that gives its
config.json.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_assets import INDEX_FILE, SINGLE_FILE
from mkd.checkpoint.hf.hf_check import EXTRA_LAYERS
from mkd.checkpoint.hf.hf_names import carried_names
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_shards import DTYPES, CarriedTensor
from mkd.errors import CheckpointError
from mkd.families.registry import FAMILIES
from mkd.plan.models.model_shape import ModelShape

LOG = logging.getLogger("mkd")


FURTHER = "mtp."  # start of the names of layers that predict further tokens
NUM_FURTHER = (*EXTRA_LAYERS, "mtp_num_hidden_layers")  # keys of config.json with the number of such layers


def find_carried(shape: ModelShape, folder: Path) -> dict[str, CarriedTensor]:
    """Return the tensors that an export of a model copies from `folder`; none if it has no weights.

    They keep their bytes. A tensor that the folder's config.json describes as quantised is dequantised.
    Raises `CheckpointError`s for weights that cannot be opened, and for a dtype that torch does not have.
    """
    if not FAMILIES[shape.family].carried:
        return {}
    has_weights = any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    checkpoint = HFCheckpoint(folder) if has_weights else None
    found = {} if checkpoint is None else dict(_carried(shape, checkpoint))
    is_lost = not any(name.startswith(FURTHER) for name in found)
    parts = shape.hf_config, shape.hf_config.get("text_config") or {}
    if is_lost and any(part.get(name) for part in parts for name in NUM_FURTHER):
        what = "the export has no layers that predict further tokens, which are not in"
        LOG.warning("%s %s; name the original model with --reference-hf to copy them", what, folder)
    return found


def _carried(shape: ModelShape, checkpoint: HFCheckpoint) -> Iterator[tuple[str, CarriedTensor]]:
    for name in carried_names(shape, checkpoint.headers):
        header = checkpoint.headers[name]
        if header.dtype not in DTYPES:
            what = f"{checkpoint.directory}: tensor {name} is stored as {header.dtype}"
            why = f"an export copies it, and mkd knows {', '.join(DTYPES)}"
            do = "remove the tensor from the folder, or use the original checkpoint of this model"
            raise CheckpointError(what, why, do, code="hf-quantisation-not-supported")
        dtype = DTYPES[header.dtype]
        yield name, CarriedTensor(header.shape, dtype, partial(_read, checkpoint, name, dtype))


def _read(checkpoint: HFCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    return checkpoint.read_whole(name).to(dtype)


def tell_of_skipped(shape: ModelShape, checkpoint: HFCheckpoint) -> None:
    """Warn of the tensors in the folder of a model that mkd does not train."""
    names = carried_names(shape, checkpoint.headers)
    if names:
        patterns = ", ".join(FAMILIES[shape.family].carried)
        what = f"{len(names)} tensors ({patterns}) are not trained; an export copies them as they are"
        LOG.warning("%s: %s", checkpoint.directory, what)
