"""Choose and check the folders of a run, and write the markers of how it ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import count, takewhile
from pathlib import Path
from types import MappingProxyType

from mkd.checkpoint.folders import SLURM_JOB, TrainingPosition, holds_checkpoints
from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.checkpoint.own_exports import OwnExports
from mkd.config.load import read_saved_config
from mkd.config.schema import CheckpointConfig, Config
from mkd.errors import UsageError
from mkd.human import counted
from mkd.run_command import quoted

SAVED_CONFIG = "config.yaml"
LOG_FILES = ("metrics.jsonl", "events.jsonl", SAVED_CONFIG, "loss_card.txt", "plan.json")
SLURM_RESTARTS = "SLURM_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # set by torchrun
SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" if torchrun keeps one store for all restarts
DONE, PREEMPTED = "DONE", "PREEMPTED"  # markers in --save: torchrun's exit code hides ours


def log_folder(config: Config) -> Path:
    """Return the folder of metrics and of the saved configuration."""
    save = None if config.log.log_dir else config.checkpoint.save
    return Path(save) if save else _default_folder(config)


def _default_folder(config: Config) -> Path:
    return Path(config.log.log_dir or Path("runs") / config.log.name)


def with_save_folder(config: Config) -> Config:
    """Return the settings with the folder that a run without --save saves in.

    That is the log folder; if it holds checkpoints, the first of FOLDER-2, FOLDER-3 ... without any, so that
    two runs never mix. A run that resumes from one of these folders stays in it. All share one cache. With
    --no-save the same folder is that of the log, unless --log-dir names one.
    """
    checkpoint = config.checkpoint
    if checkpoint.save or (checkpoint.no_save and config.log.log_dir):
        return config
    first = log_folder(config)
    folder = _resumed_folder(first, checkpoint.load) or _free_folder(first)
    data = config.data
    if folder != first and data.data_cache_path is None:
        data = replace(data, data_cache_path=str(cache_folder(config)))
    if checkpoint.no_save:
        return replace(config, log=replace(config.log, log_dir=str(folder)), data=data)
    return replace(config, checkpoint=replace(checkpoint, save=str(folder)), data=data)


def _resumed_folder(first: Path, load: str | None) -> Path | None:
    """Return the folder of checkpoints that `load` names, if it is `first` or one of its numbers."""
    is_numbered = re.compile(re.escape(first.name) + r"(-\d+)?").fullmatch
    for folder in (Path(load), Path(load).parent) if load else ():
        if is_numbered(folder.name) and _is_same(folder.parent.absolute(), first.parent.absolute()):
            return first.with_name(folder.name)
    return None


def _numbers(first: Path) -> Iterator[Path]:
    names = (first.name if number == 1 else f"{first.name}-{number}" for number in count(1))
    return map(first.with_name, names)


def _free_folder(first: Path) -> Path:
    return next(folder for folder in _numbers(first) if not holds_checkpoints(folder))


def describe_saves(config: Config) -> str:
    """Return the line that tells what the run keeps, and where."""
    checkpoint = config.checkpoint
    export = f"; exports the student to {checkpoint.export_hf} at the end" if checkpoint.export_hf else ""
    export += f", and uploads it as {checkpoint.push_to_hub}" if export and checkpoint.push_to_hub else ""
    if not checkpoint.save:
        return f"saves no checkpoints{export}"
    steps, minutes = checkpoint.save_interval, checkpoint.minutes_without_save
    times = [f"every {counted(steps, 'step')}"] if steps else []
    times += [f"after {counted(minutes, 'minute')} without a save"] if minutes else []
    return f"saves to {checkpoint.save} {', '.join([*times, 'at a stop and at the end'])}{export}"


def save_notes(config: Config) -> list[str]:
    """Return lines about an earlier run that this one does not resume, and about restarts."""
    notes = []
    if not config.checkpoint.load:
        for earlier in _passed_over(config)[-1:]:
            notes.append(f"{earlier} holds an earlier run, which --load {earlier} would resume")
    return notes + restart_notes(config.checkpoint)


def _passed_over(config: Config) -> list[Path]:
    """Return the earlier runs in the folders before that of a run without --save, which resumes none."""
    checkpoint, first = config.checkpoint, _default_folder(config)
    if not checkpoint.save or continues(checkpoint) or Path(checkpoint.save) != _free_folder(first):
        return []
    return list(takewhile(holds_checkpoints, _numbers(first)))


def requeue_problems(
    config: Config, environment: Mapping[str, str] = MappingProxyType(os.environ)
) -> Iterator[UsageError]:
    """Yield an error if Slurm has restarted this job and it would not resume its own steps."""
    job = environment.get(SLURM_JOB)
    if not job or environment.get(SLURM_RESTARTS, "0") == "0":
        return
    own = [folder for folder in _passed_over(config) if _job_of(folder) == job]
    if own:
        what = f"Slurm has started this job again, and the run would not resume what is in {own[-1]}"
        why = "that folder holds the steps of an earlier start of the same job"
        do = "give --save DIR --load DIR, so that the same command starts and resumes"
        yield UsageError(what, why, do, code="add-flag")


def write_job(folder: Path, environment: Mapping[str, str] = MappingProxyType(os.environ)) -> None:
    """Write the number of the Slurm job to its folder of checkpoints, if there is one."""
    if job := environment.get(SLURM_JOB):
        (folder / SLURM_JOB).write_text(f"{job}\n", encoding="utf-8")


def _job_of(folder: Path) -> str | None:
    path = folder / SLURM_JOB
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def logs_of_another_run(config: Config) -> bool:
    """Return True if a run that resumes finds the metrics of a run that saves elsewhere in its log folder.

    A save folder that has been moved holds its own metrics, unless a run that saves in one of its numbers
    wrote them.
    """
    checkpoint, folder = config.checkpoint, log_folder(config)
    own = [Path(one) for one in (checkpoint.save, checkpoint.load) if one]
    own += [one.parent for one in own]
    path = folder / SAVED_CONFIG
    if not checkpoint.load or not path.exists():
        return False
    saved = next((one.value for one in read_saved_config(path) if one.path == "checkpoint.save"), None)
    if saved is None or any(_is_same(Path(saved), one) for one in own):
        return False
    is_number = re.fullmatch(re.escape(folder.name) + r"-\d+", Path(saved).name) is not None
    return is_number or not any(_is_same(folder, one) for one in own)


def cache_folder(config: Config) -> Path:
    """Return the folder that caches tokenised text and vocabulary relations."""
    return Path(config.data.data_cache_path or log_folder(config) / "data_cache")


def start_problems(checkpoint: CheckpointConfig) -> Iterator[UsageError]:
    """Yield an error for each of --load and --save that does not suit a run that starts now.

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
    if save and not continues(checkpoint) and holds_checkpoints(save):
        what = f"--save {checkpoint.save} holds the checkpoints of a run that this one does not continue"
        why = "they, and the metrics of that run, would be replaced"
        do = f"resume that run (--load {checkpoint.save}), choose another --save, or remove the folder"
        yield UsageError(what, why, do, code="choose-another-folder")


def continues(checkpoint: CheckpointConfig) -> bool:
    """Return True if the run resumes in its own --save, or will do so once there is a checkpoint."""
    if not (checkpoint.save and checkpoint.load):
        return False
    save, load = Path(checkpoint.save).absolute(), Path(checkpoint.load).absolute()
    return _is_same(load, save) or _is_same(load.parent, save)


def changes_to_resume(checkpoint: CheckpointConfig, kept_in: Path | None) -> list[str]:
    """Return how the command of a run must change to resume from `kept_in`, where its last step is kept.

    Change nothing if that is None or not in --save: the command then starts as it did.
    """
    if checkpoint.save is None or kept_in is None or kept_in.parent != Path(checkpoint.save):
        return []
    changes = ["without --ckpt-step"] if checkpoint.ckpt_step is not None else []
    if not (checkpoint.load and _is_same(Path(checkpoint.load), Path(checkpoint.save))):
        changes.append(f"with --load {quoted(checkpoint.save)}")
    return changes


def restart_notes(
    checkpoint: CheckpointConfig, environment: Mapping[str, str] = MappingProxyType(os.environ)
) -> list[str]:
    """Return what a restart by torchrun would do wrong."""
    restarts = environment.get(MAX_RESTARTS, "0")
    if restarts == "0":
        return []
    notes = []
    is_one_machine = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    if environment.get(SHARES_STORE) == "True" and not is_one_machine:
        what = f"after a restart by torchrun --max-restarts {restarts} the machines would not find each other"
        notes.append(f"{what}: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all of them")
    if continues(checkpoint):
        return notes
    do = f"give --load {checkpoint.save}" if checkpoint.save else "leave out --no-save and give --load"
    return [*notes, f"torchrun --max-restarts {restarts} would restart a failed run from its beginning: {do}"]


def export_in_the_way(checkpoint: CheckpointConfig) -> UsageError | None:
    """Return an error if --export-hf would replace a model that is not an export of the same run."""
    if checkpoint.export_hf is None or checkpoint.overwrite:
        return None
    folder = Path(checkpoint.export_hf)
    is_own = continues(checkpoint) and OwnExports(Path(checkpoint.save or "")).has_written(folder)
    return None if is_own else model_in_the_way("--export-hf", folder)


def export_problems(checkpoint: CheckpointConfig, read: Iterable[Path]) -> list[UsageError]:
    """Return a problem if --export-hf would overwrite a path that the run reads, or another model."""
    if checkpoint.export_hf is None:
        return []
    folder = Path(checkpoint.export_hf)
    if folder.resolve() in [(path.parent if path.is_file() else path).resolve() for path in read]:
        what = f"--export-hf {folder} is a folder that this run reads"
        return [UsageError(what, "it would be overwritten", "choose another", code="choose-another-folder")]
    in_the_way = export_in_the_way(checkpoint)
    return [in_the_way] if in_the_way else []


def remove_markers(folder: Path) -> None:
    """Remove the markers of an earlier run, which say nothing about this one."""
    for name in (DONE, PREEMPTED):
        (folder / name).unlink(missing_ok=True)


def write_marker(folder: Path, name: str, position: TrainingPosition, reason: str) -> None:
    """Write `folder/name`, a JSON object with the position of the run and why it ended."""
    (folder / name).write_text(json.dumps({**asdict(position), "reason": reason}) + "\n", encoding="utf-8")


def _is_same(first: Path, second: Path | None) -> bool:
    return second is not None and first.resolve() == second.resolve()
