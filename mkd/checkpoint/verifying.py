"""The checkpoint to resume from: the one that the pointer names or, if damaged, the newest intact one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mkd.checkpoint.folders import (
    MEGATRON_FILE,
    find_checkpoint,
    named_or_problem,
    other_checkpoints,
    read_state,
)
from mkd.checkpoint.manifest import (
    MANIFEST_FILE,
    FileEntry,
    ManifestError,
    check_contents,
    read_manifest,
    share_of,
)
from mkd.checkpoint.pickles import refuse_code
from mkd.errors import CheckpointError, first_line
from mkd.parallel.agreement import on_rank_0, together
from mkd.parallel.context import ParallelContext


def choose_checkpoint(
    directory: Path, step: int | None, context: ParallelContext, warn: Callable[[str], None]
) -> Path | None:
    """Return the verified folder to resume from; None if `directory` has no checkpoint yet. Collective.

    With `step`, return that iteration or raise. Otherwise, if the pointer or its checkpoint is damaged, fall
    back to the newest checkpoint that verifies and warn on rank 0. Raises CheckpointError on all ranks if
    there is none.
    """
    warn = warn if context.rank == 0 else lambda text: None
    if step is not None or (directory / MEGATRON_FILE).exists():
        folder = context.broadcast_object(on_rank_0(lambda: find_checkpoint(directory, step), _explain))
        verify(folder, context, warn)
        return folder
    named, problem = context.broadcast_object(named_or_problem(directory) if context.rank == 0 else None)
    if named is None and problem is None:
        return None
    if named is not None:
        problem = _problem(named, context, warn)
        if problem is None:
            return named
    warn(f"{problem.what}: looking for the newest checkpoint that is whole")
    others = other_checkpoints(directory, named) if context.rank == 0 else None
    for folder in context.broadcast_object(others):
        found = _problem(folder, context, warn, needs_manifest=True)
        if found is None:
            warn(f"continuing from {folder}, and not from what the pointer names")
            return folder
        warn(f"{found.what}: it is passed over")
    error = CheckpointError(
        f"{directory} holds no checkpoint that is whole: {problem.what}",
        "files are missing or differ from what was saved",
        "take --load away and choose another --save to start anew, or restore the folder from a copy",
        code="checkpoint-none-whole",
    )
    error.on_all_ranks = True
    raise error


def verify(
    folder: Path, context: ParallelContext, note: Callable[[str], None], needs_manifest: bool = False
) -> None:
    """Compare every file with the manifest, each rank its share, and refuse pickles with code. Collective.

    Raises CheckpointError, which names the file, on all ranks. Unless `needs_manifest`, accept a folder
    without a manifest (written by an older version or another engine) and call `note`.
    """
    entries = context.broadcast_object(on_rank_0(lambda: _entries(folder, needs_manifest), _explain))
    if entries is None:
        if context.rank == 0:
            note(f"{folder} has no {MANIFEST_FILE}: its contents cannot be verified")
    else:
        together(lambda: _check(folder, share_of(entries, context.rank, context.world_size)), _explain)
    on_rank_0(lambda: refuse_code(folder), _explain)


def _problem(
    folder: Path, context: ParallelContext, note: Callable[[str], None], needs_manifest: bool = False
) -> CheckpointError | None:
    try:
        verify(folder, context, note, needs_manifest)
    except CheckpointError as error:
        return error
    return None


def _entries(folder: Path, needs_manifest: bool) -> dict[str, FileEntry] | None:
    try:
        entries = read_manifest(folder)
    except ManifestError as error:
        raise _damaged(str(error)) from None
    if not folder.is_dir():
        raise _damaged(f"{folder} is missing")
    if entries is None and (needs_manifest or "manifest" in read_state(folder)):
        raise _damaged(f"{folder / MANIFEST_FILE} is missing")
    return entries


def _check(folder: Path, entries: dict[str, FileEntry]) -> None:
    if (problem := check_contents(folder, entries)) is not None:
        raise _damaged(problem)


def _damaged(what: str) -> CheckpointError:
    why, do = "the checkpoint is not what was saved", "choose another with --ckpt-step N"
    return CheckpointError(what, why, do, code="checkpoint-damaged")


def _explain(error: Exception) -> CheckpointError:
    return _damaged(first_line(error))
