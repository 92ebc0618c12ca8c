"""Find the checkpoint that a run resumes from, and save new ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mkd.checkpoint.averages import averages_problem
from mkd.checkpoint.distributed import TrainingState, start_save
from mkd.checkpoint.folders import (
    ABANDONED,
    BY_STEPS,
    MEGATRON_FILE,
    Retention,
    TrainingPosition,
    later_than_pointer,
    point_at,
    read_state,
    require_same_model,
)
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.save_folder import WriterLock, lock_folder
from mkd.checkpoint.saving import Save
from mkd.checkpoint.verifying import choose_checkpoint
from mkd.config.schema import CheckpointConfig
from mkd.errors import CheckpointError
from mkd.human import duration
from mkd.kinds.averaged.averaged_teachers import averaging_teachers
from mkd.kinds.texts import Texts
from mkd.operations.console import LOG
from mkd.operations.event_log import SAVE
from mkd.operations.phases import Phases
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext
from mkd.resolve.run_plan import Plan
from mkd.run.fingerprints import ACCEPTED, changed_files, describe_changes, identify_run, require_same


def lock_save(checkpoint: CheckpointConfig, context: ParallelContext) -> WriterLock | None:
    """Take the lock of --save on rank 0. Collective; raises CheckpointError if another run holds it."""
    return lock_folder(Path(checkpoint.save), context) if checkpoint.save else None


def take_identity(plan: Plan, texts: Texts, context: ParallelContext) -> dict[str, object]:
    """Return what `identify_run` does, {} for a run that neither saves nor loads. Collective."""
    if not (plan.config.checkpoint.save or plan.config.checkpoint.load):
        return {}
    assert plan.tokenizers is not None, "a run reads text"
    identify = partial(
        identify_run, plan, plan.tokenizers.student, texts.train_set, texts.valid_set, texts.prompts
    )
    return context.broadcast_object(on_rank_0(identify, _unreadable))


def find_start(plan: Plan, run_identity: Mapping[str, object], context: ParallelContext) -> Path | None:
    """Return the verified checkpoint of --load to resume from; None means the student's own weights.

    Collective. Raises CheckpointError if it belongs to another model than the student, lacks the average of a
    teacher, or belongs to a run with other fingerprints than `run_identity`. Logs all other differences.
    """
    checkpoint = plan.config.checkpoint
    if not checkpoint.load:
        return None
    folder = choose_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step, context, LOG.warning)
    if folder is not None:
        on_rank_0(lambda: _resume(folder, plan, run_identity), _unreadable)
    else:
        LOG.info("%s holds no checkpoint yet: starting from the student's own weights", checkpoint.load)
    return folder


def _resume(folder: Path, plan: Plan, run_identity: Mapping[str, Any]) -> None:
    """Compare the resumed run with the one that saved `folder`, and move the pointer."""
    checkpoint = plan.config.checkpoint
    # Refuse first: a run that does not start must leave the pointer where it is.
    require_same_model(folder, plan.student.shape)
    saved = read_state(folder)
    lacking = averages_problem(folder, saved, averaging_teachers(plan.setups))
    if lacking is not None:  # before the fingerprints, whose differences can be accepted
        raise lacking
    known, files = run_identity["fingerprints"], changed_files(saved.get("files", {}), run_identity["files"])
    before = saved.get(ACCEPTED, ())
    require_same(folder, saved.get("fingerprints", {}), known, checkpoint.accept_change, files, before)
    left: list[Path] = []
    if checkpoint.save is not None and folder.parent.resolve() == Path(checkpoint.save).resolve():
        # Otherwise a restart after a crash would resume from a checkpoint that this run has abandoned.
        point_at(folder)
        left = later_than_pointer(folder.parent)  # after the pointer has moved
    if left:
        names = ", ".join(path.name for path in left)
        then = f"its first save replaces them, or renames them to *{ABANDONED}, which no run reads"
        LOG.warning(f"this run abandons {names}: {then}")
    if saved.get("evaluation") not in (None, run_identity["evaluation"]):
        why = "the evaluation before the first step had another loss, teacher or held-out set"
        LOG.warning(f"gap_closed is left out: {why}")
    for line in describe_changes(saved.get("settings", {}), run_identity["settings"]):
        LOG.info(line)


def describe_resume(folder: Path, iteration: int) -> str:
    """Return the line that tells where a run resumes, and how old that checkpoint is."""
    age_s = max(0.0, time.time() - (folder / MEGATRON_FILE).stat().st_mtime)
    return f"resumed from iteration {iteration} ({folder}, saved {duration(age_s)} ago)"


def build_saver(
    plan: Plan,
    context: ParallelContext,
    run_identity: Mapping[str, object],
    phases: Phases,
    rounding: Callable[[], dict[str, object]] = dict,  # entries about a rounded student; collective
) -> Saver | None:
    """Build the saver of a run; None without --save."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.save:
        return None
    return Saver(
        directory=Path(checkpoint.save),
        context=context,
        assets=plan.assets,
        run_identity=run_identity,
        retention=Retention(checkpoint.keep_checkpoints, checkpoint.save_retain_interval),
        is_async=checkpoint.async_save,
        phases=phases,
        rounding=rounding,
    )


@dataclass
class Saver:
    """Saves checkpoints. All methods are collective; errors are CheckpointErrors, raised on all ranks."""

    directory: Path
    context: ParallelContext
    assets: HFAssets
    run_identity: Mapping[str, object]  # see `identify_run`
    retention: Retention
    is_async: bool
    phases: Phases  # they announce the moments of each save
    rounding: Callable[[], dict[str, object]] = dict  # what an export of the checkpoint needs to know of it
    pending: tuple[Save, threading.Thread] | None = field(default=None, init=False)

    def save(
        self,
        state: TrainingState,
        position: TrainingPosition,
        wait: bool,
        open_interval: Mapping[str, Any],
        cause: str = BY_STEPS,  # see mkd.checkpoint.folders
    ) -> None:
        """Save `state`. With --async-save and without `wait`, a thread writes while the run continues."""
        # One save at a time: a new one deletes unfinished folders, and the pointer must move in order.
        self.finish()
        in_background = self.is_async and not wait
        started = start_save(
            self.directory,
            state,
            position,
            self.context,
            self.assets,
            run_identity={**self.run_identity, **self.rounding()},
            open_interval=open_interval,
            cause=cause,
            retention=self.retention,
            copied=in_background,
            announce=self.phases.moment,
        )
        if in_background:
            thread = threading.Thread(target=started.write, name="checkpoint writer")
            thread.start()
            self.pending = started, thread
        else:
            self._publish(started.write())

    def poll(self) -> float:
        """Call `finish` if all ranks have written. All-reduce MIN, only during a save in the background."""
        if self.pending is None:
            return 0.0
        # Threads end at different times, and `finish` is collective: all ranks enter it in the same step.
        is_here = not self.pending[1].is_alive()
        is_written = torch.tensor([is_here], dtype=torch.int32, device=self.context.device)
        dist.all_reduce(is_written, op=dist.ReduceOp.MIN)
        return self.finish() if is_written.item() else 0.0

    def finish(self) -> float:
        """Wait for the save in the background and publish it. Return the seconds this rank wrote."""
        if self.pending is None:
            return 0.0
        (started, thread), self.pending = self.pending, None
        thread.join()
        self._publish(started)
        return started.write_s

    def _publish(self, written: Save) -> None:
        LOG.info("saved checkpoint %s", written.finish(), extra={"event": SAVE})


def _unreadable(error: Exception) -> CheckpointError:
    what = f"cannot read the files that identify this run: {error}"
    return CheckpointError(what, "", "check the files of models and data", code="inputs-unreadable")
