"""Check from sizes and folders, before anything is written, whether a run can write all its files."""

from __future__ import annotations

import glob
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.folders import NEWEST_TEMPORARY, first_iteration, saved_iterations
from mkd.config.data_files import is_raw
from mkd.config.schema import Config
from mkd.data.files.named_files import files_if_any
from mkd.errors import UsageError
from mkd.human import counted, size
from mkd.operations.run_folders import cache_folder, log_folder
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import saved_bytes, weight_bytes

# Least size of the tokens relative to the raw text: six bytes of text a token, two bytes an id.
CACHE_SHARE = 1 / 3


TRIAL_BYTES = 1 << 16
"""Size of the trial write: room for metrics and events."""


@dataclass(frozen=True)
class Written:
    """Files that a run writes to one place."""

    what: str
    flag: str  # flag that moves them elsewhere
    folder: Path  # need not exist yet
    num_bytes: int = 0  # lower bound; 0 for small files
    instead: str = ""  # what to do instead of writing them

    @property
    def existing(self) -> Path:
        """The folder, or its nearest parent that exists."""
        folder = self.folder.absolute()
        return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def writes_of(
    config: Config,
    student: ModelShape | None,  # None: sizes of models are left out
    data_paths: Iterable[str],
    carried_bytes: int = 0,  # of the tensors that an export copies, beside what the student trains
) -> Iterator[Written]:
    """Yield all that the run of `config` writes."""
    checkpoint, log, bf16 = config.checkpoint, config.log, config.training.bf16
    if checkpoint.save:
        count = checkpoints_to_come(config)
        what = "a checkpoint" if count < 2 else counted(count, "checkpoint")
        num_bytes = count * saved_bytes(config, student) if student else 0
        yield Written(what, "--save", Path(checkpoint.save), num_bytes, "save nothing (--no-save)")
    if checkpoint.export_hf:
        num_bytes = weight_bytes(student, bf16) + carried_bytes if student else 0
        yield Written("the exported student", "--export-hf", Path(checkpoint.export_hf), num_bytes)
    yield Written("metrics", _log_flag(config), log_folder(config))
    if log.tensorboard_dir:
        yield Written("TensorBoard events", "--tensorboard-dir", Path(log.tensorboard_dir))
    yield from cache_writes(config, data_paths)


def cache_writes(config: Config, data_paths: Iterable[str]) -> Iterator[Written]:
    """Yield the tokenised text, if some raw file is not in the cache yet."""
    cache = cache_folder(config)
    raw = [one for path in data_paths if is_raw(path) and (one := files_if_any(path)) is not None]
    new = [one for one in raw if not any(cache.glob(f"{glob.escape(one.cache_name)}-*.idx"))]
    new_bytes = sum(one.text_bytes for one in new)
    if new_bytes:
        flag = "--data-cache-path" if config.data.data_cache_path else _log_flag(config)
        yield Written("tokenised text", flag, cache, int(CACHE_SHARE * new_bytes))


def _log_flag(config: Config) -> str:
    """Return the flag that sets the log folder."""
    return "--save" if config.checkpoint.save and not config.log.log_dir else "--log-dir"


def checkpoints_to_come(config: Config) -> int:
    """Return the number of checkpoints that need room.

    These are the ones that --keep-checkpoints keeps, and one being written. Checkpoints that exist already
    need no more room. If all are kept, only the next one counts, because people make room by hand.
    """
    checkpoint, train_iters = config.checkpoint, config.training.train_iters
    limits = (checkpoint.keep_checkpoints, checkpoint.save_retain_interval)
    kept = (checkpoint.keep_checkpoints or 1) if any(limits) else 0
    saves = -(-train_iters // checkpoint.save_interval) if checkpoint.save_interval else 1
    present = min(kept, len(saved_iterations(Path(checkpoint.save))))
    return max(1, min(kept + 1, saves) - present)


def disk_notes(config: Config, student: ModelShape) -> list[str]:
    """Warn if the disk may be full before the run ends."""
    checkpoint = config.checkpoint
    if not checkpoint.save:
        return []
    save = Written("checkpoints", "--save", Path(checkpoint.save))
    each = saved_bytes(config, student)
    staying = checkpoints_to_stay(config)
    free = shutil.disk_usage(save.existing).free
    if staying * each <= free:
        return _room_for_saves_by_time(config, save, each, free)
    retains = checkpoint.save_retain_interval is not None
    flag = "a larger --save-retain-interval" if retains else "--keep-checkpoints N"
    return [
        f"note: {counted(staying, 'more checkpoint')} of {size(each)} will stay in {save.folder} and need "
        f"{size(staying * each)}, but its disk has {size(free)} left: give {flag}, or remove checkpoints "
        "during the run"
    ]


def _room_for_saves_by_time(config: Config, save: Written, each: int, free: int) -> list[str]:
    """Warn if a long run, which saves by time, needs more room than there is."""
    checkpoint, most = config.checkpoint, NEWEST_TEMPORARY + 1
    present = min(most, len(saved_iterations(Path(checkpoint.save or ""))))
    is_limited = checkpoint.keep_checkpoints is not None or checkpoint.save_retain_interval is not None
    if is_limited or not checkpoint.minutes_without_save or (most - present) * each <= free:
        return []
    return [
        f"note: a run that saves after {counted(checkpoint.minutes_without_save, 'minute')} without a save "
        f"needs room for up to {most} checkpoints of {size(each)}, but the disk of {save.folder} has "
        f"{size(free)} left. "
        "Make room, give --keep-checkpoints 1, or give --save-interval-in-mins 0 to save only the last step"
    ]


def checkpoints_to_stay(config: Config) -> int:
    """Return how many checkpoints will be written that --keep-checkpoints does not remove."""
    checkpoint, train_iters = config.checkpoint, config.training.train_iters
    retained = checkpoint.save_retain_interval
    if checkpoint.keep_checkpoints is not None and retained is None:
        return 0
    start = first_iteration(Path(checkpoint.load), checkpoint.ckpt_step) if checkpoint.load else 0
    interval = checkpoint.save_interval or train_iters
    step = interval if retained is None else math.lcm(interval, retained)
    at_the_end = start < train_iters and (retained is None or train_iters % retained == 0)
    return max(0, (train_iters - 1) // step - start // step) + at_the_end


def disk_problems(writes: Sequence[Written]) -> list[UsageError]:
    """Return one error for each path that blocks a folder, and for each disk without enough room."""
    by_path: dict[Path, list[Written]] = {}
    for write in writes:
        by_path.setdefault(write.existing, []).append(write)
    blocked = {path: _blocked(path, of_path) for path, of_path in by_path.items()}
    by_disk: dict[int, list[Written]] = {}
    for path, of_path in by_path.items():
        if blocked[path] is None:
            by_disk.setdefault(path.stat().st_dev, []).extend(of_path)
    return [error for error in (*blocked.values(), *map(_full, by_disk.values())) if error is not None]


def require_disk(write: Written) -> None:
    """Raise UsageError if a command cannot write what it is asked for."""
    problems = disk_problems([write])
    if problems:
        raise problems[0]


def _blocked(path: Path, writes: Sequence[Written]) -> UsageError | None:
    """Return why nothing can be written below `path`, which exists."""
    if not path.is_dir():
        what = f"cannot make {writes[0].folder}: {path} is a file"
    elif not os.access(path, os.W_OK | os.X_OK):
        what = f"cannot write to {writes[0].folder}: {path} is read-only for this user"
    else:
        try:
            with tempfile.TemporaryFile(dir=path) as trial:  # a quota or a full disk shows only here
                trial.write(bytes(TRIAL_BYTES))
                trial.flush()
            return None
        except OSError as error:
            what = f"cannot write to {writes[0].folder}: {error.strerror or error}"
    why = f"the run writes {_joined(write.what for write in writes)} there"
    do = f"choose another {_joined(write.flag for write in writes)}"
    return UsageError(what, why, do, code="not-writable")


def _full(writes: Sequence[Written]) -> UsageError | None:
    """Return why the files for one disk do not fit there."""
    large = [write for write in writes if write.num_bytes]
    needed = sum(write.num_bytes for write in large)
    free = shutil.disk_usage(writes[0].existing).free
    if free >= needed:
        return None
    parts = ", ".join(f"{write.what} {size(write.num_bytes)}" for write in large)
    what = f"the disk of {large[0].folder} has {size(free)} left, the run writes {size(needed)} to it"
    do = f"make room, or choose another {_joined(write.flag for write in large)}"
    do += "".join(f", or {write.instead}" for write in large if write.instead)
    return UsageError(what, f"it would fail after all the work before: {parts}", do, code="disk-too-small")


def _joined(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))
