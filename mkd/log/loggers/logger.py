"""The base of loggers: a destination of metrics beside metrics.jsonl."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mkd.config.schema import LogConfig
from mkd.errors import UsageError

Record = Mapping[str, int | float | str]
"""A line of metrics.jsonl: keys of `mkd.log.metrics`, always `iteration`, and `split` on evaluations."""


@dataclass(frozen=True)
class LoggerStart:
    """Settings and places that a logger may read when it starts."""

    log: LogConfig
    folder: Path  # the run's log folder, which exists
    settings: Mapping[str, Any]  # path of a setting, such as kd.kd_ratio -> its value
    resumes: bool  # the run resumes from a checkpoint, so its curves should be extended


class Logger(ABC):
    """One destination of metrics. A subclass is started when its setting has a value."""

    package: ClassVar[str]  # import name of the package that it needs; pip installs it by the same name
    setting: ClassVar[str]  # field of `LogConfig` that asks for it; its flag has the same name
    advice: ClassVar[str] = ""  # what helps if it does not start
    in_background: ClassVar[bool] = (
        False  # True: a thread calls `write` and `close`, which may wait for a network
    )

    @abstractmethod
    def __init__(self, start: LoggerStart):
        """Start. Any exception is reported as an error of the start."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Store one record."""

    def truncate_after(self, iteration: int) -> None:  # noqa: B027
        """Hide the records of later iterations: a run that resumes from `iteration` writes them again.

        By default do nothing: most services cannot delete points, so their curves have these steps twice.
        """

    @abstractmethod
    def close(self) -> None:
        """Send what is left and release the destination. No call may follow."""

    @classmethod
    def flag(cls) -> str:
        """Return the flag that asks for this logger."""
        return "--" + cls.setting.replace("_", "-")

    @classmethod
    def package_missing(cls, why: str) -> UsageError:
        """Return the error of a logger whose package is not installed."""
        what = f"{cls.flag()} is set and {cls.package} is not installed"
        do = f"pip install {cls.package}, or leave {cls.flag()} out (metrics.jsonl is written either way)"
        return UsageError(what, why, do, code="package-missing")


def numbers_of(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record as `train/<key>` or `<split>/<key>`."""
    split = record.get("split", "train")
    numbers = {key: value for key, value in record.items() if not isinstance(value, str)}
    numbers.pop("iteration")
    return {f"{split}/{key}": value for key, value in numbers.items() if math.isfinite(value)}


def stored_name(start: LoggerStart, file: str, new: str) -> str:
    """Return the name in `file` of the log folder if the run resumes; else write and return `new`."""
    path = start.folder / file
    if not (start.resumes and path.exists()):
        path.write_text(new + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
