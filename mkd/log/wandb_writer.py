"""Send metrics to Weights & Biases."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkd.config.schema import LogConfig
from mkd.errors import UsageError
from mkd.log.writers import Record

RUN_ID = "wandb_run_id.txt"  # in the log folder: a resumed run extends the same curves


class WandbWriter:
    """Log every number of a record as `train/<key>` or `<split>/<key>`, over `iteration`.

    W&B cannot delete points, so the curves have steps that a resumed run repeats twice.
    """

    def __init__(
        self, log: LogConfig, folder: str | Path, settings: Mapping[str, Any], resumes: bool = False
    ):
        """Start a W&B run, or extend the folder's if it `resumes`. Raises UsageError if that fails."""
        try:
            from wandb import init
        except ImportError as error:
            what = "--wandb-project is set and wandb is not installed"
            why = f"the import failed with: {error}"
            do = "pip install wandb, or leave --wandb-project out (metrics.jsonl is written either way)"
            raise UsageError(what, why, do, code="package-missing") from error
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            names = dict(project=log.wandb_project, entity=log.wandb_entity, name=log.name, dir=str(folder))
            self._run = init(id=run_id(folder, resumes), resume="allow", config=dict(settings), **names)
        except Exception as error:  # wandb's errors share no base class
            what = f"W&B did not start: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            do = "wandb login, or set WANDB_MODE=offline, or leave --wandb-project out"
            raise UsageError(what, "", do, code="wandb-not-started") from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, record: Record) -> None:
        split = record.get("split", "train")
        values = {"iteration": record["iteration"]}
        for key, value in record.items():
            if key not in ("iteration", "split") and (isinstance(value, str) or math.isfinite(value)):
                values[f"{split}/{key}"] = value
        self._run.log(values)

    def truncate_after(self, iteration: int) -> None:
        """Do nothing: W&B cannot delete points (see `Writer`)."""

    def close(self) -> None:
        self._run.finish()


def run_id(folder: Path, resumes: bool) -> str:
    """Return the W&B id: the stored one if the run resumes, else a new one, even in a used folder."""
    path = folder / RUN_ID
    if not (resumes and path.exists()):
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
