"""What can be known before training about whether it will be able to save."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from mkd.checkpoint.hf_names import hf_tensor_shapes
from mkd.errors import CheckpointError
from mkd.plan.model_shape import ModelShape

ADAM_BYTES = 8  # two fp32 moments of a parameter
MASTER_BYTES = 4  # the fp32 copy of a bf16 one


def checkpoint_bytes(shape: ModelShape, bf16: bool) -> int:
    """Size of a checkpoint with optimizer: weights, fp32 copies, moments. A few percent of small things come on top."""
    learned = sum(math.prod(full) for full in hf_tensor_shapes(shape).values())
    return learned * (2 + MASTER_BYTES + ADAM_BYTES if bf16 else 4 + ADAM_BYTES)


def save_problem(directory: Path, needed_bytes: int) -> CheckpointError | None:
    """Why a checkpoint of `needed_bytes` cannot be written below `directory`, which need not exist yet; None if it can."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        return CheckpointError(f"{there} is a file", f"--save {directory} needs a folder", "choose another --save")
    if not os.access(there, os.W_OK | os.X_OK):
        why = "the run could not save what it has learnt"
        return CheckpointError(f"cannot write to {there}: it is read-only for this user", why, "choose another --save")
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        return CheckpointError(
            f"{there} has {free / 2**30:.2f} GiB of free space, a checkpoint takes {needed_bytes / 2**30:.2f} GiB",
            "the first save would fail after all the training before it",
            "make room, or choose another --save",
        )
    return None
