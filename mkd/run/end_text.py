"""Text at the end of a run: where everything is, what it reached, and the next commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.config.schema import PAIR_LOSSES
from mkd.human import counted, duration, fixed
from mkd.log.records import read_records, split_of
from mkd.operations.run_folders import changes_to_resume
from mkd.parent_process import STAGE
from mkd.run_command import mkd_command, quoted

if TYPE_CHECKING:  # they load torch
    from mkd.operations.stopping import Stop
    from mkd.run.loop import Run

FIGURES = (
    ("kd", "kd_loss", 6),
    ("ce", "ce_loss", 5),
    ("top1", "top1_agreement", 5),
    *(("acc", f"{loss.prefix}/accuracy", 4) for loss in PAIR_LOSSES),
)
"""Label, held-out metric and its columns, of the summary."""


def end_text(run: Run, folder: Path, seconds: float, stop: Stop | None = None) -> str:
    """Return the summary of a run that logs to `folder` and has ended without being preempted.

    `stop` is what ended it before its last step.
    """
    checkpoint, asked = run.config.checkpoint, run.config.training.train_iters
    kept = run.progress.kept_in if run.progress.kept_iteration == run.position.iteration else None
    rows = {
        "weights": f"{kept}" if kept else "not saved (--no-save)",
        "export": checkpoint.export_hf or "none",
        "metrics": f"{folder / 'metrics.jsonl'}, settings in config.yaml, events in events.jsonl",
        **dict(held_out_rows(read_records(folder))),
    }
    iteration = run.position.iteration
    is_done = iteration >= asked
    lines = [
        f"{'done' if is_done else 'stopped'}: {iteration:,} of {counted(asked, 'step')}, {duration(seconds)}"
    ]
    if not is_done:
        exit_interval = run.config.training.exit_interval
        rows = {"reason": stop.reason if stop else f"--exit-interval {exit_interval}", **rows}
    lines += [f"  {name:9} {text}" for name, text in rows.items()]
    if STAGE not in os.environ:  # otherwise `the same command` would be another one than the user's
        lines += ["next:", *(f"  {command}" for command in _commands(run, folder))]
    return "\n".join(lines)


def held_out_rows(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the first and the last evaluation of held-out text, side by side."""
    valid = [record for record in records if split_of(record) == "valid"]
    if not valid:
        return
    first, last = valid[0], valid[-1]
    figures = []
    for label, key, width in FIGURES:
        values = [record.get(key) for record in (first, last)]
        if all(isinstance(value, (int, float)) for value in values):
            before, after = (fixed(value, width).strip() for value in values)
            figures.append(f"{label} {before} -> {after}" if last is not first else f"{label} {after}")
    steps = [first["iteration"]] * (last is not first) + [last["iteration"]]
    yield "held-out", f"{', '.join(figures)} (after step {' and '.join(map(str, steps))})"


def _commands(run: Run, folder: Path) -> Iterator[str]:
    mkd, checkpoint = mkd_command(), run.config.checkpoint
    model, save = checkpoint.export_hf, checkpoint.save
    if model is None and save:
        model = str(Path(save) / "hf")
        yield f"{mkd} export --load {quoted(save)} --hf-out {quoted(model)}    # a Hugging Face model"
    if model is not None:
        then = ", once it is exported" if checkpoint.export_hf is None else ""
        yield f"{mkd} chat {quoted(model)}    # talk with the student{then}"
        yield f"{mkd} evaluate --student-hf {quoted(model)} --completions FILE.jsonl    # your own task"
        yield f"{mkd} serve-check {quoted(model)}    # a server computes the same"
    yield f"{mkd} report {quoted(folder)}    # the run as one page"
    if not save:
        return
    changes = changes_to_resume(checkpoint, run.progress.kept_in)
    is_done = run.position.iteration >= run.config.training.train_iters
    changes += ["with a larger --train-iters"] if is_done else []
    same = f"the same command {' and '.join(changes)}".rstrip()
    yield f"{same}    # {'trains further' if is_done else 'resumes'}"
