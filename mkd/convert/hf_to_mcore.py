"""Conversion of a Hugging Face folder to a Megatron checkpoint of iteration 0."""

from __future__ import annotations

from pathlib import Path

import torch

from mkd.checkpoint.distributed import TrainingState, save_checkpoint
from mkd.checkpoint.folders import TrainingPosition
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.convert.conversion_checks import require_room
from mkd.convert.models import DTYPES, build_context, load_from_hf
from mkd.families.weight_rules import KEPT_IN_FP32
from mkd.human import counted
from mkd.plan.models.model_shape import ModelShape


def run(
    hf: str,
    save: Path,
    dtype: str | None,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    overwrite: bool = False,
) -> None:
    """Convert `hf` to a checkpoint in `save`; `dtype` defaults to that of the files. Arguments are flags.

    They are those that `conversion_checks` has accepted. Raises CheckpointError if `hf` is incomplete, and if
    `save` holds checkpoints, unless `overwrite` allows to replace a conversion.
    """
    require_room(save, overwrite)
    folder = resolve_hf(hf)
    shape, checkpoint = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
    check_hf_checkpoint(shape, checkpoint)
    others = (one for name, one in checkpoint.headers.items() if not name.endswith(KEPT_IN_FP32))
    stored = {header.dtype for header in others}
    kept = torch.bfloat16 if stored == {"BF16"} else torch.float32
    weights = DTYPES[dtype] if dtype else kept
    context = build_context(tensor_model_parallel_size, pipeline_model_parallel_size)
    state = TrainingState([load_from_hf(folder, shape, weights, context)])
    saved = save_checkpoint(save, state, TrainingPosition(), context, HFAssets.of(folder))
    if context.rank == 0:
        dtype = str(weights).removeprefix("torch.")
        print(f"saved {shape.family}, {counted(shape.num_layers, 'layer')}, {dtype}, to {saved}")
    context.leave()
