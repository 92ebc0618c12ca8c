"""A Hugging Face folder to a Megatron checkpoint of iteration 0."""

from __future__ import annotations

from pathlib import Path

import torch

from mkd.checkpoint.distributed import POINTER, TrainingPosition, TrainingState, save_checkpoint
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_reader import HFCheckpoint, check_hf_checkpoint, resolve_hf
from mkd.convert.models import DTYPES, join, load_from_hf
from mkd.errors import CheckpointError
from mkd.plan.model_shape import ModelShape


def run(
    hf: str, save: Path, dtype: str | None, tensor_model_parallel_size: int, pipeline_model_parallel_size: int
) -> None:
    """Read, build, save: the tool's flags. The checkpoint keeps the dtype of the files unless `dtype` says otherwise.

    Raises CheckpointError where `save` has checkpoints or `hf` is not whole, UsageError where the sizes do not make up the
    world.
    """
    folder = resolve_hf(hf)
    shape, checkpoint = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
    check_hf_checkpoint(shape, checkpoint)
    if (save / POINTER).exists():
        raise CheckpointError(
            f"{save} already holds checkpoints",
            "a converted model is iteration 0: the run in that folder would start over",
            "choose an empty folder for --save",
            code="convert-save-not-empty",
        )
    stored = {header.dtype for header in checkpoint.headers.values()}
    kept = torch.bfloat16 if stored == {"BF16"} else torch.float32
    weights = DTYPES[dtype] if dtype else kept
    context = join(tensor_model_parallel_size, pipeline_model_parallel_size)
    state = TrainingState([load_from_hf(folder, shape, weights, context)])
    saved = save_checkpoint(save, state, TrainingPosition(), context, HFAssets.of(folder))
    if context.rank == 0:
        print(
            f"saved {shape.family}, {shape.num_layers} layers, {str(weights).removeprefix('torch.')}, to {saved}"
        )
    context.leave()
