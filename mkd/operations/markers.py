"""Files in the save folder that say how a run ended: scripts need not trust the exit code of torchrun, which hides ours."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from mkd.checkpoint.distributed import TrainingPosition

DONE, PREEMPTED = "DONE", "PREEMPTED"


def remove_markers(folder: Path) -> None:
    """At the start: what an earlier run has left says nothing about this one."""
    for name in (DONE, PREEMPTED):
        (folder / name).unlink(missing_ok=True)


def write_marker(folder: Path, name: str, position: TrainingPosition, reason: str) -> None:
    """`folder/name`, a JSON object: where the run stands and why it ended."""
    (folder / name).write_text(json.dumps({**asdict(position), "reason": reason}) + "\n", encoding="utf-8")
