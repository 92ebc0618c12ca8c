"""Send metrics to Weights & Biases."""

from __future__ import annotations

import uuid

from mkd.log.loggers.logger import Logger, LoggerStart, Record, numbers_of, stored_name

RUN_ID = "wandb_run_id.txt"  # in the log folder: a resumed run extends the same curves


class WandbLogger(Logger):
    """Log every number of a record as `train/<key>` or `<split>/<key>`, over `iteration`."""

    package = "wandb"
    setting = "wandb_project"
    advice = "wandb login, or set WANDB_MODE=offline"

    def __init__(self, start: LoggerStart):
        """Start a W&B run, or extend the folder's."""
        from wandb import init

        log = start.log
        names = dict(project=log.wandb_project, entity=log.wandb_entity, name=log.name)
        run_id = stored_name(start, RUN_ID, uuid.uuid4().hex[:8])
        settings = dict(start.settings)
        self._run = init(id=run_id, resume="allow", config=settings, dir=str(start.folder), **names)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, record: Record) -> None:
        self._run.log({"iteration": record["iteration"], **numbers_of(record)})

    def close(self) -> None:
        self._run.finish()
