"""The end of a dry run: whether the run can start, and what it will do, save, take and need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.checkpoint.folders import first_iteration
from mkd.config.data_files import data_paths
from mkd.config.schema import Config
from mkd.human import counted, duration, gpu_hours, number, size
from mkd.operations.disk import Written, writes_of
from mkd.operations.run_folders import describe_saves
from mkd.plan.advice.verdict import fullest_rank
from mkd.plan.times.hardware import USABLE

if TYPE_CHECKING:  # it loads torch
    from mkd.resolve.run_plan import Plan


def verdict_text(plan: Plan) -> str:
    """Return the verdict on a run without problems; only its predicted memory may be against it."""
    memory = _memory_problem(plan)
    rows = {
        "start": _start(plan.config),
        "saves": _saves(plan.config),
        "evaluates": _evaluations(plan.config),
        "takes": _effort(plan),
        "disk": "; ".join(_disk(plan)),
    }
    head = f"dry run: NOT OK: {memory}" if memory else "dry run: OK, the run can start"
    return "\n".join([head, *(f"  {name:9}  {text}" for name, text in rows.items())])


def _memory_problem(plan: Plan) -> str:
    gib = plan.config.device_memory_gib or plan.gpu_gib
    rank, need_gib = fullest_rank(plan.forecast)
    if gib is None or need_gib <= USABLE * gib:
        return ""
    return f"pipeline rank {rank} needs {need_gib:.1f} GiB of a GPU's {gib:.1f} (see `memory:` above)"


def _first_iteration(config: Config) -> int:
    checkpoint = config.checkpoint
    return first_iteration(Path(checkpoint.load), checkpoint.ckpt_step) if checkpoint.load else 0


def _start(config: Config) -> str:
    start, steps, load = _first_iteration(config), config.training.train_iters, config.checkpoint.load
    if start:
        return f"resumes from iteration {start} in {load}, up to {steps}"
    empty = f"; --load {load} holds no checkpoint yet" if load else ""
    return f"new run of {counted(steps, 'step')}{empty}"


def _saves(config: Config) -> str:
    is_lost = not config.checkpoint.keeps_weights
    return describe_saves(config).removeprefix("saves ") + (
        ": the trained weights are lost at the end" if is_lost else ""
    )


def _evaluations(config: Config) -> str:
    training, data = config.training, config.data
    if not training.evaluates:
        if training.eval_interval is None:
            return "nothing; --valid-data-path or --split 99,1,0 hold data out"
        return "nothing: --eval-interval or --eval-iters is 0" + (
            ", so --valid-data-path is not used" if data.valid_data_path else ""
        )
    interval = training.eval_interval or 0
    between = f", every {counted(interval, 'step')}" if interval < training.train_iters else ""
    tasks = bool(data.eval_multiple_choice or data.eval_completions)
    what = "held-out text and tasks" if tasks else "held-out text"
    most = f"{counted(training.eval_iters, 'batch')} at most"
    return f"{what} before the first step{between} and after the last, {most}"


def _effort(plan: Plan) -> str:
    steps = max(plan.config.training.train_iters - _first_iteration(plan.config), 0)
    hours, gpus = steps * plan.forecast.planned_step_ms() / 3.6e6, plan.forecast.num_gpus
    tokens = number(steps * plan.batch.tokens_per_step)
    what = f"{duration(3600 * hours)} predicted on {counted(gpus, 'H200')}, {gpu_hours(hours * gpus)}"
    return f"{tokens} tokens in {counted(steps, 'step')}; " + (
        what if plan.gpu_gib else "the time on CPUs is not predicted"
    )


def _disk(plan: Plan) -> Iterator[str]:
    """Yield what is written to each disk, and how much it has left."""
    by_disk: dict[int, list[Written]] = {}
    paths = data_paths([], plan.config.data)
    carried = plan.student.carried_bytes if plan.config.checkpoint.export_hf else 0
    for write in writes_of(plan.config, plan.student.shape, paths, carried):
        by_disk.setdefault(write.existing.stat().st_dev, []).append(write)
    for writes in by_disk.values():
        large = [f"{one.what} {size(one.num_bytes)} in {one.folder}" for one in writes if one.num_bytes]
        free = size(shutil.disk_usage(writes[0].existing).free)
        need = size(sum(one.num_bytes for one in writes))
        yield f"{need} of {free} free: {', '.join(large)}" if large else f"{free} free"
