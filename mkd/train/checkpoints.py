"""The checkpoints of a run: what it continues from, and where and how it saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mkd.checkpoint.agreement import on_rank_0
from mkd.checkpoint.choosing import choose_checkpoint
from mkd.checkpoint.fingerprints import require_same
from mkd.checkpoint.folders import Retention, read_state
from mkd.checkpoint.lock import WriterLock
from mkd.checkpoint.saver import Saver, lock_folder
from mkd.config.schema import CheckpointConfig
from mkd.errors import CheckpointError
from mkd.parallel.context import ParallelContext
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.fingerprints import fingerprints
from mkd.train.plan import Plan
from mkd.train.report import Reporter


def lock_save(checkpoint: CheckpointConfig, context: ParallelContext) -> WriterLock | None:
    """The lock of --save, on rank 0. Collective; raises CheckpointError when another run holds it."""
    return lock_folder(Path(checkpoint.save), context) if checkpoint.save else None


def take_fingerprints(plan: Plan, tokenizer: Tokenizer, train_set, context: ParallelContext) -> dict[str, object]:
    """What the run is made of, for its checkpoints; {} where it neither saves nor loads any. Collective."""
    if not (plan.config.checkpoint.save or plan.config.checkpoint.load):
        return {}
    return context.broadcast_object(on_rank_0(lambda: fingerprints(plan, tokenizer, train_set), _unreadable))


def find_start(checkpoint: CheckpointConfig, known: Mapping[str, object], context: ParallelContext) -> Path | None:
    """The verified checkpoint of --load to continue from; None: start from the student's own weights. Collective.

    Raises CheckpointError when it was saved by a run whose fingerprints are not the `known` ones.
    """

    def say(text: str) -> None:
        print(f" {text}", flush=True)

    if not checkpoint.load:
        return None
    folder = choose_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step, context, say)
    if folder is not None:
        accepted = checkpoint.accept_change
        on_rank_0(lambda: require_same(folder, read_state(folder).get("fingerprints", {}), known, accepted), _unreadable)
    elif context.rank == 0:
        say(f"{checkpoint.load} holds no checkpoint yet: starting from the student's own weights")
    return folder


def build_saver(
    plan: Plan, context: ParallelContext, known: Mapping[str, object], lock: WriterLock | None, reporter: Reporter
) -> Saver | None:
    """None without --save."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.save:
        return None
    return Saver(
        directory=Path(checkpoint.save),
        context=context,
        hf_dir=plan.student.assets,
        fingerprints=known,
        retention=Retention(checkpoint.keep_checkpoints, checkpoint.save_retain_interval),
        is_async=checkpoint.async_save,
        lock=lock,
        note=reporter.note,
    )


def _unreadable(error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot read what this run is made of: {error}", "", "check the files of models and data")
