"""Where a run writes what it was not told a place for."""

from __future__ import annotations

from pathlib import Path

from mkd.config.schema import Config


def log_folder(config: Config) -> Path:
    """Where metrics and the saved configuration go."""
    return Path(config.log.log_dir or config.checkpoint.save or Path("runs") / config.log.name)


def cache_folder(config: Config) -> Path:
    """Where tokenised text and vocabulary relations are cached."""
    return Path(config.data.data_cache_path or log_folder(config) / "data_cache")
