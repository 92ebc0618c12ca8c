"""Write metrics as TensorBoard events."""

from __future__ import annotations

from mkd.log.loggers.logger import Logger, LoggerStart, Record


class TensorBoardLogger(Logger):
    """Write every number of a record as the scalar `train/<key>` or `<split>/<key>` at its iteration."""

    package = "tensorboard"
    setting = "tensorboard_dir"
    advice = "choose a folder that can be written"

    def __init__(self, start: LoggerStart):
        """Create the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._directory = str(start.log.tensorboard_dir)
        self._open = SummaryWriter
        self._events = self._open(self._directory)

    def write(self, record: Record) -> None:
        split = record.get("split", "train")
        for key, value in record.items():
            if key not in ("iteration", "split"):
                self._events.add_scalar(f"{split}/{key}", value, record["iteration"])
        self._events.flush()

    def truncate_after(self, iteration: int) -> None:
        """Hide later records with a marker, because event files are append-only."""
        self._events.close()
        self._events = self._open(self._directory, purge_step=iteration + 1)

    def close(self) -> None:
        self._events.close()
