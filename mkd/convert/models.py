"""The parts of a model that a conversion holds on each of its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mkd.checkpoint.hf.hf_reader import HFCheckpoint, load_hf_weights
from mkd.errors import UsageError
from mkd.models.builder import build_chunks
from mkd.models.language_model import LanguageModel
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape
from mkd.platform import detect

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def join(tensor: int, pipeline: int) -> ParallelContext:
    """The process grid of a conversion. Raises UsageError when the parallel sizes do not make up the world."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor * pipeline != world_size:
        raise UsageError(
            f"tensor-model-parallel-size {tensor} x pipeline-model-parallel-size {pipeline} is not {world_size} processes",
            "every rank of a conversion holds one part of the model",
            f"start it with torchrun --nproc-per-node {tensor * pipeline}",
            code="convert-layout-not-processes",
        )
    return ParallelContext.create(detect(), tensor_parallel=tensor, pipeline_parallel=pipeline)


def build_model(shape: ModelShape, dtype: torch.dtype, context: ParallelContext) -> LanguageModel:
    """This rank's part of the model, weights uninitialised; layers are split as evenly as possible."""
    share, more = divmod(shape.num_layers, context.pp_size)
    layers = tuple(share + (stage < more) for stage in range(context.pp_size))
    (chunk,) = build_chunks(
        shape, PipelineLayout(layers, context.pp_size), ModelOptions(dtype=dtype), context
    )
    return chunk


def load_from_hf(
    folder: Path, shape: ModelShape, dtype: torch.dtype, context: ParallelContext
) -> LanguageModel:
    """This rank's part of the model in `folder`; reads only its slices."""
    chunk = build_model(shape, dtype, context)
    ranks = dict(tp_rank=context.tp_rank, tp_size=context.tp_size)
    load_hf_weights(chunk, shape, HFCheckpoint(folder), first_layer=chunk.first_layer, **ranks)
    return chunk
