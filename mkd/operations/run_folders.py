"""Choose and check the folders of a run, and write the markers of how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mkd.checkpoint.folders import TrainingPosition, holds_checkpoints
from mkd.config.schema import CheckpointConfig, Config
from mkd.errors import UsageError

LOG_FILES = ("metrics.jsonl", "events.jsonl", "config.yaml", "loss_card.txt", "plan.json")
DONE, PREEMPTED = "DONE", "PREEMPTED"  # markers in --save: torchrun's exit code hides ours


def log_folder(config: Config) -> Path:
    """Return the folder of metrics and of the saved configuration."""
    return Path(config.log.log_dir or config.checkpoint.save or Path("runs") / config.log.name)


def cache_folder(config: Config) -> Path:
    """Return the folder that caches tokenised text and vocabulary relations."""
    return Path(config.data.data_cache_path or log_folder(config) / "data_cache")


def start_problems(checkpoint: CheckpointConfig) -> Iterator[UsageError]:
    """Yield the problems of --load and --save for a run that starts now.

    Refuse a --load without a checkpoint, and a --save with checkpoints of a run that this one does not
    continue. Nothing has been written yet. If --load equals --save, it may be empty, because a scheduler
    always starts the same command.
    """
    folders = checkpoint.save, checkpoint.load
    save, load = (Path(folder).absolute() if folder else None for folder in folders)
    if load and not _is_same(load, save) and not holds_checkpoints(load):
        what = f"--load {checkpoint.load} holds no checkpoint"
        why = "the run would start from the student's own weights"
        do = "check the path, or leave out --load to start from scratch"
        yield UsageError(what, why, do, code="load-holds-no-checkpoint")
    continues = load is not None and (_is_same(load, save) or _is_same(load.parent, save))
    if save and not continues and holds_checkpoints(save):
        what = f"--save {checkpoint.save} holds the checkpoints of a run that this one does not continue"
        why = "they, and the metrics of that run, would be replaced"
        do = f"resume that run (--load {checkpoint.save}), choose another --save, or remove the folder"
        yield UsageError(what, why, do, code="save-holds-another-run")


def remove_markers(folder: Path) -> None:
    """Remove the markers of an earlier run, which say nothing about this one."""
    for name in (DONE, PREEMPTED):
        (folder / name).unlink(missing_ok=True)


def write_marker(folder: Path, name: str, position: TrainingPosition, reason: str) -> None:
    """Write `folder/name`, a JSON object with the position of the run and why it ended."""
    (folder / name).write_text(json.dumps({**asdict(position), "reason": reason}) + "\n", encoding="utf-8")


def _is_same(first: Path, second: Path | None) -> bool:
    return second is not None and first.resolve() == second.resolve()
