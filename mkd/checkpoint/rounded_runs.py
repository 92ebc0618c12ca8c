"""Checkpoints of rounded students: they hold the exact weights, and say how these are rounded."""

from __future__ import annotations

from pathlib import Path

from mkd.checkpoint.folders import read_state
from mkd.errors import CheckpointError

ROUNDING = "rounding"
"""Entry of a checkpoint's state: format, groups, exclusions, and the largest inputs."""


def require_exact_model(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint is of a rounded student, whose weights it holds unrounded."""
    if ROUNDING in read_state(folder):
        what = f"{folder} holds the exact weights of a student that is rounded"
        why = "the model that was trained has rounded weights, which an export holds"
        do = f"export it, and name that folder: mkd export --load {folder} --hf-out NEW"
        raise CheckpointError(what, why, do, code="checkpoint-of-another-model")
