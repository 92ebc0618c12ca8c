"""Conversion of a Hugging Face folder to a Megatron checkpoint of iteration 0."""

from __future__ import annotations

from pathlib import Path

import torch

from mkd.checkpoint.distributed import TrainingState, save_checkpoint
from mkd.checkpoint.folders import TrainingPosition, holds_checkpoints, iteration_folder, saved_iterations
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_reader import HFCheckpoint, resolve_hf
from mkd.convert.models import DTYPES, build_context, load_from_hf
from mkd.errors import CheckpointError
from mkd.families.weight_rules import KEPT_IN_FP32
from mkd.plan.model_shape import ModelShape


def run(
    hf: str,
    save: Path,
    dtype: str | None,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    overwrite: bool = False,
) -> None:
    """Convert `hf` to a checkpoint in `save`; `dtype` defaults to that of the files. Arguments are flags.

    Raises CheckpointError if `save` has checkpoints or `hf` is incomplete, and UsageError if the parallel
    sizes do not multiply to the number of processes.
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
        print(f"saved {shape.family}, {shape.num_layers} layers, {dtype}, to {saved}")
    context.leave()


def require_room(save: Path, overwrite: bool) -> None:
    """Raise CheckpointError if `save` holds checkpoints. A conversion alone may be overwritten."""
    if not holds_checkpoints(save):
        return
    is_run = any(folder != iteration_folder(save, 0) for folder in saved_iterations(save))
    if is_run or not overwrite:
        what, do = f"{save} already holds checkpoints", "choose an empty folder for --save"
        do += "" if is_run else ", or give --overwrite to replace the conversion in it"
        why = "a converted model is iteration 0, so the run in that folder would start over"
        raise CheckpointError(what, why, do, code="convert-save-not-empty")
