"""The registry of loggers, and their start."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mkd.config.schema import LogConfig
from mkd.errors import UsageError
from mkd.log.loggers.guarded import Guarded
from mkd.log.loggers.logger import Logger, LoggerStart
from mkd.log.loggers.mlflow_logger import MlflowLogger
from mkd.log.loggers.tensorboard_logger import TensorBoardLogger
from mkd.log.loggers.trackio_logger import TrackioLogger
from mkd.log.loggers.wandb_logger import WandbLogger

LOGGERS: Mapping[str, type[Logger]] = MappingProxyType(
    {"TensorBoard": TensorBoardLogger, "W&B": WandbLogger, "MLflow": MlflowLogger, "trackio": TrackioLogger}
)
"""Name in messages -> logger."""


def wanted_loggers(log: LogConfig) -> dict[str, type[Logger]]:
    """Return the loggers that the settings ask for, by name."""
    return {name: logger for name, logger in LOGGERS.items() if getattr(log, logger.setting)}


def missing_packages(log: LogConfig) -> Iterator[UsageError]:
    """Yield an error for each wanted logger without its package, to raise before anything is loaded."""
    for logger in wanted_loggers(log).values():
        if not is_installed(logger.package):
            yield logger.package_missing("its figures would be missing after the run")


def start_loggers(start: LoggerStart) -> list[Guarded]:
    """Start the loggers that the settings ask for. Raises UsageError if one does not start."""
    return [_started(name, logger, start) for name, logger in wanted_loggers(start.log).items()]


def _started(name: str, logger: type[Logger], start: LoggerStart) -> Guarded:
    try:
        return Guarded(name, logger(start), in_background=logger.in_background)
    except ModuleNotFoundError as error:
        raise logger.package_missing(f"the import failed with: {error}") from error
    except Exception as error:  # the errors of these packages share no base class
        what = f"{name} did not start: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        do = f"{logger.advice or 'see its documentation'}, or leave {logger.flag()} out"
        raise UsageError(what, "", do, code="logger-not-started") from error


def is_installed(package: str) -> bool:
    """Return True if `package` is installed; a folder of that name (W&B's) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
