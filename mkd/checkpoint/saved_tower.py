"""Checkpoints without a vision tower: an earlier mkd ran the text model of Qwen3.5 alone.

Such a run resumes: the tower keeps the weights of the student's folder, where it was frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from mkd.checkpoint.hf.hf_tower import TOWER, tower_of
from mkd.checkpoint.pickles import read_metadata
from mkd.errors import CheckpointError

EXPORT = "mkd export --load DIR --hf-out NEW --reference-hf ORIGINAL; then name NEW in its place"


def lacks_tower(folder: Path, models: Iterable[nn.Module]) -> bool:
    """Return True if one of this rank's model parts has a tower, and the checkpoint in `folder` has none.

    Raises CheckpointError if the checkpoint's metadata cannot be read.
    """
    if not any(map(tower_of, models)):
        return False
    return not any(name.startswith(TOWER) for name in read_metadata(folder).state_dict_metadata)


def tower_problem(
    folder: Path, models: Iterable[nn.Module], is_training: bool, has_weights: bool
) -> CheckpointError | None:
    """Return the error if a model of this rank cannot do with the checkpoint, which has no tower.

    `has_weights`: the towers have been read from elsewhere. Those of a training run must be frozen, because
    the checkpoint's optimizer has no state for them.
    """
    learns = is_training and any(one.requires_grad for part in models for one in tower_of(part).values())
    if has_weights and not learns:
        return None
    why = "an earlier mkd saved it, which ran the text model of this family alone"
    do = f"make a whole model of it: {EXPORT}"
    if has_weights:
        why = f"{why}; the optimizer has no state for the projector or tower that is now trained"
        do = f"resume with --student-train-parts text, or start anew: {EXPORT}"
    return CheckpointError(f"{folder} has no vision tower", why, do, code="checkpoint-of-another-model")
