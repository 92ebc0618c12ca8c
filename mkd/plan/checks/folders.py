"""Check that settings of checkpoints have the folder they need."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.plan.checks.no_effect import no_effect

_NEED_SAVE = ("save_interval", "save_retain_interval", "keep_checkpoints", "async_save")


def check_folders(config: Config) -> Iterator[UsageError]:
    """Check that --save and --load are given where other settings rely on them."""
    checkpoint = config.checkpoint
    for name in _NEED_SAVE:
        value = getattr(checkpoint, name)
        if value and not checkpoint.save:
            yield UsageError(
                f"{name.replace('_', '-')} {value} has no folder", "", "give --save DIR", code="save-missing"
            )
    if checkpoint.accept_change and not checkpoint.load:
        why = "a run is compared only with the checkpoint that it resumes from"
        yield no_effect("accept-change", why, "add --load DIR")
    if checkpoint.ckpt_step is not None and not (checkpoint.load or config.student.load):
        what = f"ckpt-step {checkpoint.ckpt_step} has no folder"
        yield UsageError(what, "", "give --load DIR", code="ckpt-step-without-load")
