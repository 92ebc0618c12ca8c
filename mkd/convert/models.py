"""The process grid of a conversion and the part of the model on each rank."""

from __future__ import annotations

from pathlib import Path

import torch

from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_weights import load_hf_weights, tell_of_unfilled
from mkd.errors import MkdError, collect_error
from mkd.models.builder import build_model_parts
from mkd.models.language_model import LanguageModel
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.agreement import agree
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import LoRAShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_context(tensor: int, pipeline: int) -> ParallelContext:
    """Join the process grid of a conversion."""
    return ParallelContext.create(detect(), Sizes(tensor=tensor, pipeline=pipeline))


def build_model(
    shape: ModelShape, dtype: torch.dtype, context: ParallelContext, lora: LoRAShape | None = None
) -> LanguageModel:
    """Build this rank's part of the model, weights uninitialised; layers divided as evenly as possible.

    `lora`: its adapters; None: it has none.
    """
    share, more = divmod(shape.num_layers, context.pp_size)
    layers = tuple(share + (stage < more) for stage in range(context.pp_size))
    layout = PipelineLayout(layers, context.pp_size)
    (model,) = build_model_parts(shape, layout, ModelOptions(dtype=dtype, lora=lora), context)
    return model


def load_from_hf(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    context: ParallelContext,
    lora: LoRAShape | None = None,  # its adapters, which stay without values; None: it has none
) -> LanguageModel:
    """Load this rank's part of the model in `folder`, reading only its slices. Collective.

    If one rank finds a tensor that cannot be used, all raise its error.
    """
    model = build_model(shape, dtype, context, lora)
    problems: list[MkdError] = []
    checkpoint = HFCheckpoint(folder)
    given = shape, checkpoint, context, model.first_layer
    collect_error(problems, lambda: load_hf_weights(model, *given))
    agree(problems[0] if problems else None)
    tell_of_unfilled(checkpoint)
    return model
