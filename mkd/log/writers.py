"""Writers of metrics behind one logger: metrics.jsonl, TensorBoard and W&B (`wandb_writer.py`).

A record is a flat mapping: the keys of `mkd.log.metrics`, always `iteration`, and `split` on evaluation
lines.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from mkd.config.schema import LogConfig
from mkd.errors import MkdError, UsageError

Record = Mapping[str, int | float | str]


class Writer(Protocol):
    """One destination of metrics."""

    def write(self, record: Record) -> None:
        """Store one record so that readers see it on return."""

    def truncate_after(self, iteration: int) -> None:
        """Remove the records of later iterations: a run that resumes from `iteration` writes them again."""

    def close(self) -> None:
        """Release the destination. No call may follow."""


def missing_packages(log: LogConfig) -> Iterator[UsageError]:
    """Yield an error for each requested writer without its package, to raise before anything is loaded."""
    tensorboard = "tensorboard", "--tensorboard-dir", log.tensorboard_dir
    for package, flag, value in (tensorboard, ("wandb", "--wandb-project", log.wandb_project)):
        if value and not is_installed(package):
            what = f"{flag} is set and {package} is not installed"
            why = "its figures would be missing after the run"
            do = f"pip install {package}, or leave {flag} out (metrics.jsonl is written either way)"
            yield UsageError(what, why, do, code="package-missing")


def is_installed(package: str) -> bool:
    """Return True if `package` is installed; a folder of that name (W&B's) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def set_aside(path: Path) -> Path | None:
    """Rename the records of an earlier run, if any, to the first free NAME.N.SUFFIX. Writers follow them."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    kept = next(name for name in names if not name.exists())
    return path.rename(kept)


class JsonlWriter:
    """Append one JSON object a line. NaN and infinity, which JSON does not have, become null."""

    def __init__(self, path: str | Path):
        """Open `path`, created if missing. Remove an unfinished last line, left by a crash during a write."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)

    def write(self, record: Record) -> None:
        line = json.dumps({key: _json_value(value) for key, value in record.items()}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def truncate_after(self, iteration: int) -> None:
        """Remove later records (see `Writer`). A crash leaves either the old or the new file."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _iteration(line) <= iteration]
        if len(kept) == len(lines):
            return
        replacement = self.path.with_name(self.path.name + ".new")
        with replacement.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        os.replace(replacement, self.path)
        self._file = self.path.open("ab")

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Write every number of a record as the scalar `train/<key>` or `<split>/<key>` at its iteration."""

    def __init__(self, directory: str | Path):
        """Create the event file in `directory`. Raises UsageError if tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            what = "--tensorboard-dir is set and tensorboard is not installed"
            why = f"the import failed with: {error}"
            do = "pip install tensorboard, or leave --tensorboard-dir out: metrics.jsonl is always written"
            raise UsageError(what, why, do, code="package-missing") from error
        self._open: Callable[..., Any] = partial(SummaryWriter, str(directory))
        self._events = self._open()

    def write(self, record: Record) -> None:
        split = record.get("split", "train")
        for key, value in record.items():
            if key not in ("iteration", "split"):
                self._events.add_scalar(f"{split}/{key}", value, record["iteration"])
        self._events.flush()

    def truncate_after(self, iteration: int) -> None:
        """Hide later records (see `Writer`) with a marker, because event files are append-only."""
        self._events.close()
        self._events = self._open(purge_step=iteration + 1)

    def close(self) -> None:
        self._events.close()


class MetricLogger:
    """Send each record to every writer. Ranks that do not report have a logger without writers."""

    def __init__(self, writers: Sequence[Writer] = ()):
        self.writers = tuple(writers)

    def write(self, record: Record) -> None:
        """Write `record`. Raises MkdError if a writer fails."""
        try:
            for writer in self.writers:
                writer.write(record)
        except OSError as error:
            what = f"the metrics of iteration {record['iteration']} could not be written: {error}"
            why = "a run without its metrics cannot be judged"
            do = "free disk space, and start the run again"
            raise MkdError(what, why, do, code="metrics-not-written") from error

    def truncate_after(self, iteration: int) -> None:
        for writer in self.writers:
            writer.truncate_after(iteration)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def _json_value(value: int | float | str) -> int | float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _iteration(line: bytes) -> float:
    """Return the iteration of a line; infinity, so that it is dropped, if the line is not a record."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf
