"""The checkpoints of a run: what it continues from, and where and how it saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from mkd.checkpoint.distributed import TrainingState, start_save
from mkd.checkpoint.folders import (
    ABANDONED,
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
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext
from mkd.plan.model_shape import ModelShape
from mkd.run.changed_settings import describe_changes, run_settings
from mkd.run.fingerprints import evaluation_print, fingerprints, require_same
from mkd.run.run_plan import Plan
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.report import Reporter


def lock_save(checkpoint: CheckpointConfig, context: ParallelContext) -> WriterLock | None:
    """The lock of --save, on rank 0. Collective; raises CheckpointError when another run holds it."""
    return lock_folder(Path(checkpoint.save), context) if checkpoint.save else None


def take_origin(
    plan: Plan, tokenizer: Tokenizer, train_set, valid_set, context: ParallelContext
) -> dict[str, object]:
    """What the run is, for its checkpoints; {} where it neither saves nor loads any. Collective.

    `fingerprints` must be the same when it goes on, `settings` may change, `evaluation` says what gap_closed is a share of.
    """

    def look() -> dict[str, object]:
        known = fingerprints(plan, tokenizer, train_set)
        return {
            "fingerprints": known,
            "settings": run_settings(plan),
            "evaluation": evaluation_print(plan, known, valid_set),
        }

    if not (plan.config.checkpoint.save or plan.config.checkpoint.load):
        return {}
    return context.broadcast_object(on_rank_0(look, _unreadable))


def find_start(
    checkpoint: CheckpointConfig, student: ModelShape, origin: Mapping[str, object], context: ParallelContext
) -> Path | None:
    """The verified checkpoint of --load to continue from; None: start from the student's own weights. Collective.

    Raises CheckpointError when it is of another model than `student`, or was saved by a run whose fingerprints are not those of
    `origin`; says what else has changed.
    """

    def say(text: str) -> None:
        print(f" {text}", flush=True)

    if not checkpoint.load:
        return None
    folder = choose_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step, context, say)
    if folder is not None:
        on_rank_0(lambda: _take_up(folder, checkpoint, student, origin, say), _unreadable)
    elif context.rank == 0:
        say(f"{checkpoint.load} holds no checkpoint yet: starting from the student's own weights")
    return folder


def _take_up(
    folder: Path,
    checkpoint: CheckpointConfig,
    student: ModelShape,
    origin: Mapping[str, object],
    say: Callable[[str], None],
) -> None:
    """Compare the run that goes on with the one that saved `folder`, and move the pointer."""
    require_same_model(folder, student)
    saved = read_state(folder)
    require_same(folder, saved.get("fingerprints", {}), origin["fingerprints"], checkpoint.accept_change)
    left = later_than_pointer(folder.parent) if _point_at(folder, checkpoint) else []
    if left:
        names = ", ".join(path.name for path in left)
        say(
            f"this run leaves {names} behind: its first save replaces or renames them, to *{ABANDONED}, which no run reads"
        )
    if saved.get("evaluation") not in (None, origin["evaluation"]):
        say(
            "gap_closed is left out: the evaluation before the first step was of another loss, teacher or held-out set"
        )
    for line in describe_changes(saved.get("settings", {}), origin["settings"]):
        say(line)


def _point_at(folder: Path, checkpoint: CheckpointConfig) -> bool:
    """A run that goes back in its own --save leaves what it goes back from: a start after a crash must not go on from that.

    Returns whether `folder` is in its --save.
    """
    is_own = checkpoint.save is not None and folder.parent.resolve() == Path(checkpoint.save).resolve()
    if is_own:
        point_at(folder)
    return is_own


def build_saver(
    plan: Plan, context: ParallelContext, origin: Mapping[str, object], reporter: Reporter
) -> Saver | None:
    """None without --save."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.save:
        return None
    return Saver(
        directory=Path(checkpoint.save),
        context=context,
        assets=plan.assets,
        origin=origin,
        retention=Retention(checkpoint.keep_checkpoints, checkpoint.save_retain_interval),
        is_async=checkpoint.async_save,
        note=reporter.note,
    )


@dataclass
class Saver:
    """All methods are collective. Errors are CheckpointErrors, raised on all ranks."""

    directory: Path
    context: ParallelContext
    assets: HFAssets
    origin: Mapping[str, object]  # as of `start_save`
    retention: Retention
    is_async: bool
    note: Callable[[str], None]  # called with what has been saved
    pending: tuple[Save, threading.Thread] | None = field(default=None, init=False)

    def save(
        self, state: TrainingState, position: TrainingPosition, wait: bool, open_interval: Mapping
    ) -> None:
        """Save `state` as it is now. Without `wait`, a run that saves asynchronously goes on while a thread writes."""
        self.finish()
        in_background = self.is_async and not wait
        started = start_save(
            self.directory,
            state,
            position,
            self.context,
            self.assets,
            origin=self.origin,
            open_interval=open_interval,
            retention=self.retention,
            copied=in_background,
        )
        if in_background:
            thread = threading.Thread(target=started.write, name="checkpoint writer")
            thread.start()
            self.pending = started, thread
        else:
            self._done(started.write())

    def poll(self) -> float:
        """`finish`, if all ranks have written. An all-reduce MIN, only while there is a save in the background."""
        if self.pending is None:
            return 0.0
        is_written = torch.tensor(
            [not self.pending[1].is_alive()], dtype=torch.int32, device=self.context.device
        )
        dist.all_reduce(is_written, op=dist.ReduceOp.MIN)
        return self.finish() if is_written.item() else 0.0

    def finish(self) -> float:
        """Wait for the save in the background, if there is one; the seconds that writing took on this rank, or 0."""
        if self.pending is None:
            return 0.0
        (started, thread), self.pending = self.pending, None
        thread.join()
        self._done(started)
        return started.write_s

    def _done(self, written: Save) -> None:
        self.note(f"saved checkpoint {written.finish()}")


def _unreadable(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot read what this run is made of: {error}",
        "",
        "check the files of models and data",
        code="inputs-unreadable",
    )
