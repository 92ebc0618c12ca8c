"""Whether a run may begin with the folders of --save and --load, known before anything is written."""

from __future__ import annotations

from pathlib import Path

from mkd.checkpoint.folders import holds_checkpoints
from mkd.config.schema import CheckpointConfig
from mkd.errors import UsageError


def start_problems(checkpoint: CheckpointConfig) -> list[UsageError]:
    """A --load with nothing to go on from, and a --save with the checkpoints of a run that this one does not continue.

    A --load that is --save may be empty: so it is at the first start of a job that its scheduler starts again and again.
    """
    save, load = (
        Path(folder).absolute() if folder else None for folder in (checkpoint.save, checkpoint.load)
    )
    problems = []
    if load and not _is_same(load, save) and not holds_checkpoints(load):
        problems.append(
            UsageError(
                f"--load {checkpoint.load} holds no checkpoint",
                "the run would start from the student's own weights",
                "check the path, or take --load away to start anew",
                code="load-holds-no-checkpoint",
            )
        )
    continues = load is not None and (_is_same(load, save) or _is_same(load.parent, save))
    if save and not continues and holds_checkpoints(save):
        problems.append(
            UsageError(
                f"--save {checkpoint.save} holds the checkpoints of a run that this one does not continue",
                "they, and the metrics of that run, would be replaced",
                f"go on with that run (--load {checkpoint.save}), choose another --save, or remove the folder",
                code="save-holds-another-run",
            )
        )
    return problems


def _is_same(first: Path, second: Path | None) -> bool:
    return second is not None and first.resolve() == second.resolve()
