"""The folder of checkpoints: their names, the pointer to the latest, retention and fallback.

SAVE/iter_0000010/                        a complete checkpoint with its manifest
SAVE/iter_0000010.partial/                a checkpoint that is being written or removed; never read
SAVE/iter_0000010.replaced/               the old checkpoint of an iteration while the new one takes its name
SAVE/iter_0000010.abandoned/              a checkpoint after the one that a run rewound to; never read
SAVE/latest_checkpointed_iteration.txt    the pointer: written last, replaced atomically
SAVE/SLURM_JOB_ID                         the Slurm job that wrote here last, if there was one
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mkd.checkpoint.manifest import ManifestError, check_sizes, read_manifest, sync
from mkd.config.schema import StudentConfig, TeacherConfig
from mkd.errors import CheckpointError
from mkd.plan.models.model_shape import ModelShape

POINTER = "latest_checkpointed_iteration.txt"
STATE_FILE = "mkd.json"
COMMON_FILE = "common.pt"  # all content except tensors that is equal on all ranks
MEGATRON_FILE = "metadata.json"  # written by Megatron's own save when it is complete
HF_FOLDER = "hf"
SLURM_JOB = "SLURM_JOB_ID"  # variable, and file of SAVE with its value
PARTIAL, REPLACED, ABANDONED = ".partial", ".replaced", ".abandoned"
SETTINGS, REPLICAS = "settings", "data-parallel replicas"  # entry of STATE_FILE: flag -> value; and one of it
CAUSE = "cause"  # entry of STATE_FILE: why a checkpoint was saved, one of these
BY_STEPS, BY_TIME, STOPPED, LAST = "steps", "time", "stop", "last"
NEWEST_TEMPORARY = 2  # those by time or of a stop stay while they are among so many newest ones
ANOTHER = "choose another with --ckpt-step N"
ITERATION_FOLDER = re.compile(rf"iter_(\d{{7,}})({re.escape(REPLACED)})?")


@dataclass(frozen=True)
class TrainingPosition:
    """Progress of a run, independent of the layout."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0  # tokens of these packs, whose length may change between runs
    skipped_iterations: int = 0
    consumed_prompts: int = 0  # completed by the student, in runs with rollouts


@dataclass(frozen=True)
class Retention:
    """Rule for which checkpoints stay after a save. The latest one always stays."""

    newest: int | None = None  # how many to keep; None: all, or only the latest if `interval` is set
    interval: int | None = None  # also keep iterations that are a multiple of it

    def keeps(self, iteration: int, place: int, is_temporary: bool = False) -> bool:
        """Return True if the checkpoint of `iteration`, number `place` from the latest (0), stays.

        Without flags, those that somebody asked for stay, and the newest of the others.
        """
        if self.newest is None and self.interval is None:
            return not is_temporary or place < NEWEST_TEMPORARY
        return place < (self.newest or 1) or (self.interval is not None and iteration % self.interval == 0)


def iteration_folder(directory: Path, iteration: int) -> Path:
    """Return the folder of an iteration in `directory`."""
    return directory / f"iter_{iteration:07d}"


def holds_checkpoints(directory: Path) -> bool:
    """Return True if `directory` is a checkpoint or contains any, intact or damaged."""
    is_named = any((directory / name).exists() for name in (MEGATRON_FILE, POINTER))
    return is_named or bool(saved_iterations(directory))


def find_checkpoint(directory: Path, step: int | None = None) -> Path | None:
    """Return the iteration folder that `directory` points to or is itself; None if nothing is saved there.

    Look at names only; `load_checkpoint` checks the contents. Raises CheckpointError if the pointer leads
    nowhere, or if `directory` is a checkpoint of another step.
    """
    if (directory / MEGATRON_FILE).exists():
        if step is not None and directory.name != iteration_folder(directory.parent, step).name:
            raise CheckpointError(
                f"{directory} is one checkpoint, and --ckpt-step asks for iteration {step}",
                "the step chooses among the checkpoints of a folder",
                "name the folder that it lies in, or leave out --ckpt-step",
                code="checkpoint-not-found",
            )
        return directory
    folder = named_by_pointer(directory) if step is None else iteration_folder(directory, step)
    if folder is None:
        return None
    if not folder.exists():
        present = ", ".join(path.name for path in saved_iterations(directory)) or "no checkpoint"
        what, why = f"there is no {folder}", f"its folder has {present}"
        raise CheckpointError(what, why, ANOTHER, code="checkpoint-not-found")
    if not (folder / MEGATRON_FILE).exists():
        what, why = f"{folder} is not a complete checkpoint", f"its {MEGATRON_FILE} is missing"
        raise CheckpointError(what, why, ANOTHER, code="checkpoint-damaged")
    return folder


def find_weights(role: str, source: StudentConfig | TeacherConfig) -> Path:
    """Return the checkpoint of --student-load or --teacher-load. Raises CheckpointError without one."""
    assert source.load, "the weights are in a checkpoint"
    folder = find_checkpoint(Path(source.load))
    if folder is None:
        is_student = isinstance(source, StudentConfig)
        place = "--student-load" if is_student else "--teacher-load, or load: of a teacher in a file"
        what = f"the {role}'s folder {source.load} holds no checkpoint"
        why = "its weights are read from there"
        do = f"name a folder that --save or `mkd convert` has written to: {place}"
        raise CheckpointError(what, why, do, code="checkpoint-missing")
    return folder


def named_by_pointer(directory: Path) -> Path | None:
    """Return the folder that the pointer names, existing or not. None and errors are as in `read_pointer`."""
    step = read_pointer(directory)
    return None if step is None else iteration_folder(directory, step)


def read_pointer(directory: Path) -> int | None:
    """Return the iteration that the pointer names; None without checkpoints. Raises CheckpointError."""
    pointer, do = directory / POINTER, "choose a checkpoint with --ckpt-step N"
    try:
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        if not saved_iterations(directory):
            return None
        what, why = f"{pointer} is missing", "it names the checkpoint to continue from"
        raise CheckpointError(what, why, do, code="checkpoint-damaged") from None
    except OSError as error:
        what = f"{pointer} cannot be read: {error}"
        raise CheckpointError(what, "", do, code="checkpoint-damaged") from None
    if not (text.isascii() and text.isdigit()):
        what = f"{pointer} holds {text[:40]!r}, not an iteration"
        raise CheckpointError(what, "", do, code="checkpoint-damaged")
    return int(text)


def write_pointer(directory: Path, iteration: int, before_replace: Callable[[], None] = lambda: None) -> None:
    """Move the pointer atomically and durably; call `before_replace` between writing and replacing."""
    path, temporary = directory / POINTER, directory / (POINTER + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    before_replace()
    os.replace(temporary, path)
    sync(directory)


def point_at(folder: Path) -> None:
    """Move the pointer of a checkpoint's directory to that checkpoint, unless it already names it."""
    match = ITERATION_FOLDER.fullmatch(folder.name)
    if match is None or match.group(2) is not None:
        return
    try:
        current = read_pointer(folder.parent)
    except CheckpointError:
        current = None
    if current != int(match.group(1)):
        write_pointer(folder.parent, int(match.group(1)))


def later_than_pointer(directory: Path) -> list[Path]:
    """Return the checkpoints after the one that the pointer names, which a rewind left behind."""
    try:
        named = read_pointer(directory)
    except CheckpointError:
        return []
    found = [] if named is None else saved_iterations(directory)
    return [folder for folder in found if iteration_of(folder) > named]


def abandon(folders: Iterable[Path]) -> None:
    """Rename checkpoints so that retention and fallback ignore them. Delete older ones of that name."""
    for folder in folders:
        left = folder.with_name(folder.name.removesuffix(REPLACED) + ABANDONED)
        remove(left)
        folder.rename(left)


def saved_iterations(directory: Path) -> list[Path]:
    """Return the folders of `directory` that look like checkpoints, latest first."""
    found = []
    for path in directory.glob("iter_*"):
        match = ITERATION_FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append((int(match.group(1)), match.group(2) is None, path))
    return [path for *_, path in sorted(found, reverse=True)]


def iteration_of(folder: Path) -> int:
    """Return the iteration in the name of a checkpoint's folder; 0 for another name."""
    match = ITERATION_FOLDER.fullmatch(folder.name)
    return 0 if match is None else int(match.group(1))


def oldest_iteration(directory: Path) -> int:
    """Return the iteration of the first checkpoint that a run could resume from; 0 without any."""
    return min(map(iteration_of, saved_iterations(directory)), default=0)


def first_iteration(directory: Path, step: int | None) -> int:
    """Return the iteration that `choose_checkpoint` resumes from if the files are whole; 0 for a new run."""
    if step is not None:
        return step
    if (directory / MEGATRON_FILE).exists():
        return iteration_of(directory)
    named, _ = named_or_problem(directory)
    folders = [*([named] if named else []), *other_checkpoints(directory, named)]
    return next((iteration_of(folder) for folder in folders if folder.is_dir()), 0)


def other_checkpoints(directory: Path, named: Path | None) -> list[Path]:
    """Return the checkpoints except `named`, latest first. Those after it, left by a rewind, come last."""
    folders = [folder for folder in saved_iterations(directory) if folder != named]
    if named is None:
        return folders
    return sorted(folders, key=lambda folder: folder.name.removesuffix(REPLACED) > named.name)


def named_or_problem(directory: Path) -> tuple[Path | None, CheckpointError | None]:
    """Return (folder that the pointer names, problem with the pointer)."""
    try:
        return named_by_pointer(directory), None
    except CheckpointError as error:
        return None, error


def has_valid_names(folder: Path) -> bool:
    """Return True if a folder has a manifest and all files in it have their sizes."""
    try:
        entries = read_manifest(folder)
    except ManifestError:
        return False
    return entries is not None and check_sizes(folder, entries) is None


def publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name. An old checkpoint of that name stays readable until then."""
    former = folder.with_name(folder.name + REPLACED)
    remove(former)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    sync(folder.parent)
    remove(former)


def remove(folder: Path) -> None:
    """Delete a checkpoint if it exists, renamed to .partial first, so that no process reads the remains."""
    if not folder.exists():
        return
    doomed = folder.with_name(folder.name.removesuffix(PARTIAL) + PARTIAL)
    if folder != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_stumps(directory: Path) -> None:
    """Delete the remains of killed saves. Only the process that holds the lock may call it."""
    for path in directory.glob(f"iter_*{PARTIAL}"):
        shutil.rmtree(path)


def apply_retention(directory: Path, retention: Retention, latest: int) -> list[Path]:
    """Delete intact checkpoints up to iteration `latest`, just saved, that `retention` drops; return them.

    Damaged checkpoints, later ones and those without a manifest are neither counted nor deleted.
    """
    doomed, place = [], 0
    for folder in saved_iterations(directory):
        iteration = iteration_of(folder)
        if iteration > latest or not has_valid_names(folder):
            continue
        if not retention.keeps(iteration, place, _is_temporary(folder)):
            doomed.append(folder)
        place += 1
    for folder in doomed:
        remove(folder)
    return doomed


def _is_temporary(folder: Path) -> bool:
    try:
        return read_state(folder).get(CAUSE) in (BY_TIME, STOPPED)
    except CheckpointError:
        return False


def position_of(state: Mapping[str, Any]) -> TrainingPosition:
    """Return the position in a state of `read_state`.

    Checkpoints of 2026-11-22 and before have no count of tokens; all their packs have one length. Later ones
    may lack that of prompts, of which they had none.
    """
    state = {"consumed_prompts": 0, **state}
    if "consumed_tokens" not in state:
        seq_length = state.get("fingerprints", {}).get("data.seq_length", 0)
        state = {**state, "consumed_tokens": state["consumed_samples"] * seq_length}
    return TrainingPosition(**{name: state[name] for name in asdict(TrainingPosition())})


def require_same_model(folder: Path, shape: ModelShape) -> None:
    """Raise CheckpointError if `folder` describes another model. Accept a folder without a description."""
    described = folder / HF_FOLDER
    if not (described / "config.json").exists():
        return
    differences = ModelShape.from_hf_dir(described).differences(shape)
    if differences:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: it has {', '.join(differences)}",
            "its weights would silently be cut, dropped or used in another architecture",
            "name the Hugging Face folder that it was made from; to change a model, export it with"
            " `mkd export` and change the config.json of that",
            code="checkpoint-of-another-model",
        )


def read_state(folder: Path) -> dict[str, Any]:
    """Return the JSON state of a checkpoint. One of another Megatron engine has none and starts at 0."""
    path, first = folder / STATE_FILE, asdict(TrainingPosition())
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        needed = first.keys() - {"consumed_tokens", "consumed_prompts"}
        if not isinstance(state, dict) or not needed <= state.keys():
            raise ValueError(f"it is not an object with {', '.join(sorted(needed))}")
    except FileNotFoundError:
        return first
    except ValueError as error:
        what = f"{path} is damaged: {error}"
        raise CheckpointError(what, "", ANOTHER, code="checkpoint-damaged") from None
    return state
