"""A Megatron checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from mkd.checkpoint.distributed import TrainingState, load_checkpoint
from mkd.checkpoint.folders import HF_FOLDER, find_checkpoint, require_same_model
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_reader import resolve_hf
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.checkpoint.verifying import verify
from mkd.convert.models import DTYPES, build_model, join
from mkd.errors import CheckpointError
from mkd.plan.model_shape import ModelShape


def locate(load: Path, step: int | None, reference_hf: str | None) -> tuple[Path, Path]:
    """(iteration folder, Hugging Face folder that describes the model).

    Raises CheckpointError where there is none, or where the reference describes another model than the checkpoint.
    """
    folder = find_checkpoint(load, step)
    if folder is None:
        raise CheckpointError(
            f"--load {load} holds no checkpoint",
            "neither the folder nor an iter_* folder in it is one",
            "name a folder that --save has written to",
            code="convert-checkpoint-missing",
        )
    if reference_hf is not None:
        reference = resolve_hf(reference_hf)
        require_same_model(folder, ModelShape.from_hf_dir(reference))
        return folder, reference
    if not (folder / HF_FOLDER / "config.json").exists():
        raise CheckpointError(
            f"{folder} does not say what model it is",
            f"it has no {HF_FOLDER}/config.json",
            "name the Hugging Face folder of the model with --reference-hf",
            code="convert-model-unknown",
        )
    return folder, folder / HF_FOLDER


def saved_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights in a checkpoint, as its embedding has it; fp32 when there is no such entry."""
    embedding = dist_checkpointing.load_tensors_metadata(str(folder)).get("embedding.word_embeddings.weight")
    return torch.float32 if embedding is None else embedding.dtype


def run(
    load: Path,
    ckpt_step: int | None,
    hf_out: Path,
    reference_hf: str | None,
    dtype: str | None,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
) -> None:
    """Load at the layout of this world, export: the tool's flags.

    Raises CheckpointError where `load` has no whole checkpoint or does not say what model it is, UsageError where the sizes
    do not make up the world.
    """
    folder, reference = locate(load, ckpt_step, reference_hf)
    shape = ModelShape.from_hf_dir(reference)
    context = join(tensor_model_parallel_size, pipeline_model_parallel_size)
    verify(folder, context, print)  # before anything of it is unpickled
    weights = DTYPES[dtype] if dtype else saved_dtype(folder)
    chunk = build_model(shape, weights, context)
    load_checkpoint(folder, TrainingState([chunk]), context, is_verified=True)
    export_hf([(chunk, chunk.first_layer)], shape, hf_out, context=context, assets=HFAssets.of(reference))
    if context.rank == 0:
        print(f"exported {folder} as {str(weights).removeprefix('torch.')} to {hf_out}")
    context.leave()
