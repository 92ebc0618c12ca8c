"""Problems of a conversion that are found before torch is imported: of its models, folders and disks.

`hf_to_mcore`, `mcore_to_hf` and `parity` take the flags of the commands for the modules of these names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from mkd.checkpoint.adapters import require_base, require_whole_model, saved_adapters
from mkd.checkpoint.folders import (
    HF_FOLDER,
    find_checkpoint,
    holds_checkpoints,
    iteration_folder,
    require_same_model,
    saved_iterations,
)
from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.checkpoint.hf.hf_hub import config_folder, resolve_hf
from mkd.errors import CheckpointError, UsageError
from mkd.human import counted
from mkd.operations.disk import Written, require_disk
from mkd.operations.run_folders import SAVED_CONFIG
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import weight_bytes
from mkd.release.gguf_file import GGUFFile
from mkd.release.hub_push import HubRepository


def hf_to_mcore(hf: str, save: Path, dtype: str | None, overwrite: bool, **layout: int) -> None:
    """Raise the problem of a conversion to a Megatron checkpoint."""
    _require_processes(**layout)
    require_room(save, overwrite)
    folder = config_folder(hf)
    shape = ModelShape.from_hf_dir(folder)
    is_bf16 = dtype == "bf16" if dtype else _is_in_bf16(folder)
    require_disk(Written("the checkpoint", "--save", save, weight_bytes(shape, is_bf16)))


def parity(hf: str, hf_b: str | None, load: Path | None, ckpt_step: int | None, **_: object) -> None:
    """Raise the problem of a model that is to be compared."""
    config_folder(hf)
    if load is not None:
        require_whole_model(locate(load, ckpt_step, hf)[0])
    elif hf_b:
        config_folder(hf_b)


def mcore_to_hf(
    load: Path,
    ckpt_step: int | None,
    hf_out: Path,
    reference_hf: str | None,
    dtype: str | None,
    overwrite: bool,
    lora_out: Path | None = None,
    push_to_hub: str | None = None,
    gguf: Path | None = None,
    gguf_type: str = "auto",
    log_dir: Path | None = None,
    **layout: int,
) -> None:
    """Raise the problem of an export to a Hugging Face folder."""
    _require_processes(**layout)
    in_the_way = None if overwrite else model_in_the_way("--hf-out", hf_out)
    if in_the_way is not None:
        raise in_the_way
    if log_dir is not None and not (log_dir / SAVED_CONFIG).is_file():
        what, why = f"--log-dir {log_dir} is not the log folder of a run", f"it has no {SAVED_CONFIG}"
        raise UsageError(what, why, "name the folder with metrics.jsonl", code="path-not-found")
    folder, reference = locate(load, ckpt_step, reference_hf)
    problem = GGUFFile(gguf, gguf_type).problem(overwrite) if gguf else None
    if problem is None and push_to_hub and int(os.environ.get("RANK", "0")) == 0:
        problem = HubRepository(push_to_hub).problem([reference_hf or ""], overwrite)
    if problem is not None:
        raise problem
    shape = ModelShape.from_hf_dir(reference)
    if saved_adapters(folder) is not None:
        require_base(folder, reference)
    elif lora_out is not None:
        raise no_effect("lora-out", f"{folder} holds a whole model, and no adapters", "remove it")
    in_the_way = model_in_the_way("--lora-out", lora_out) if lora_out and not overwrite else None
    if in_the_way is not None:
        raise in_the_way
    require_room_for_export(hf_out, shape, dtype)


def require_room_for_export(
    hf_out: Path, shape: ModelShape, dtype: str | None, carried_bytes: int = 0
) -> None:
    """Raise UsageError if the disk is too small for the weights and the tensors that are copied."""
    num_bytes = weight_bytes(shape, dtype != "fp32") + carried_bytes
    require_disk(Written("the model", "--hf-out", hf_out, num_bytes))


def locate(load: Path, step: int | None, reference_hf: str | None) -> tuple[Path, Path]:
    """Return (iteration folder, Hugging Face folder that describes the model).

    Raises CheckpointError if either is missing, or if they describe different models.
    """
    folder = find_checkpoint(load, step)
    if folder is None:
        what, do = f"--load {load} holds no checkpoint", "name a folder that --save has written to"
        why = "neither the folder nor an iter_* folder in it is one"
        raise CheckpointError(what, why, do, code="checkpoint-missing")
    if reference_hf is not None:
        reference = resolve_hf(reference_hf)
        require_same_model(folder, ModelShape.from_hf_dir(reference))
        return folder, reference
    if not (folder / HF_FOLDER / "config.json").exists():
        what, why = f"{folder} does not say what model it is", f"it has no {HF_FOLDER}/config.json"
        do = "name the Hugging Face folder of the model with --reference-hf"
        raise CheckpointError(what, why, do, code="checkpoint-of-another-model")
    return folder, folder / HF_FOLDER


def require_room(save: Path, overwrite: bool) -> None:
    """Raise CheckpointError if `save` holds checkpoints. A conversion alone may be overwritten."""
    if not holds_checkpoints(save):
        return
    is_run = any(folder != iteration_folder(save, 0) for folder in saved_iterations(save))
    if is_run or not overwrite:
        what, do = f"{save} already holds checkpoints", "choose an empty folder for --save"
        do += "" if is_run else ", or give --overwrite to replace the conversion in it"
        why = "a converted model is iteration 0, so the run in that folder would start over"
        raise CheckpointError(what, why, do, code="save-folder-taken")


def _is_in_bf16(folder: Path) -> bool:
    """Return True if a model's config.json names bf16 as the dtype of its files, or no dtype."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name: str = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return name == "bfloat16"


def _require_processes(tensor_model_parallel_size: int, pipeline_model_parallel_size: int) -> None:
    """Raise UsageError for parallel sizes that do not fit the number of processes."""
    tensor, pipeline = tensor_model_parallel_size, pipeline_model_parallel_size
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor * pipeline != world_size:
        raise UsageError(
            f"tensor-model-parallel-size {tensor} x pipeline-model-parallel-size {pipeline} "
            f"is not {counted(world_size, 'process')}",
            "every rank of a conversion holds one part of the model",
            f"start it with torchrun --nproc-per-node {tensor * pipeline}",
            code="number-of-processes",
        )
