"""Run steps on records that a tool game writes beside the run, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.kinds.sampled.tool_game import write_groups
from tests.train.rollout_run import make_files

SEQ_LENGTH, GROUPS, MEMBERS = 64, 3, 3

__all__ = ["argv", "make_files", "one_step", "playing"]


def argv(files: Path, run: str, *more: object, ratio: float = 0.25) -> list[str]:
    """Return the command line of a run whose steps have 3 groups of 3 records; with a ratio of 1 only KD."""
    words: list[object] = ["--student-hf", files / "student", "--teacher-hf", files / "teacher"]
    words += [
        "--on-policy-fraction",
        1,
        "--rollout-source",
        "records",
        "--rollout-records",
        files / f"{run} in",
    ]
    words += ["--rollout-prompts", GROUPS, "--samples-per-prompt", MEMBERS, "--max-staleness", 2]
    words += ["--kd-ratio", ratio, "--kd-divergence", "reverse_kl", "--log-interval", 1]
    words += ["--reward", "records"] if ratio < 1 else []
    words += ["--seq-length", SEQ_LENGTH, "--global-batch-size", 4, "--train-iters", 4, "--lr", 1e-3]
    words += ["--log-dir", files / run, "--data-cache-path", files / "cache"]
    return [str(word) for word in (*words, *more)]


@contextmanager
def playing(
    files: Path, run: str, groups: int = 40, ahead: int = 2, pause_s: tuple[int, float] = (0, 0.0)
) -> Iterator[None]:
    """Play games inside the block, for the run of this name.

    `pause_s`: the number of groups after which the agents pause, and how long.
    """
    folder, over = files / f"{run} in", threading.Event()
    folder.mkdir(exist_ok=True)
    thread = threading.Thread(target=_play, args=(folder, groups, over, ahead, pause_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def _play(folder: Path, groups: int, over: threading.Event, ahead: int, pause_s: tuple[int, float]) -> None:
    while not (folder / "progress.json").exists() and not over.wait(0.05):
        pass
    first, seconds = pause_s
    if first and not over.is_set():
        write_groups(folder, first, over.is_set, ahead)
        over.wait(seconds)
    if not over.is_set():
        write_groups(folder, groups, over.is_set, ahead)


def one_step(arguments: list[str], out_dir: Path) -> dict:
    """Read records, run one step's forward and backward, export its gradients; return what it had."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from mkd.train.step import training_objective
    from tests.train.invariance import export_student, gradients_as_parameters
    from tests.train.reward_run import judged_documents

    run = build_run(plan_run(load_config(arguments).config, torch.distributed.get_world_size()), detect())
    stream, engine = run.data.train, run.engine
    batches = stream.next_step()
    run.meter.start()
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches, run.meter)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    with gradients_as_parameters(engine, engine.context):
        export_student(engine, run.state, Path(arguments[arguments.index("--student-hf") + 1]), out_dir)
    run.reporter.close()
    return {
        "sums": objective.sums(sums).token_sums(),
        "figures": run.meter.finish(),
        "documents": [document for batch in batches for document in judged_documents(batch)],
        "rollouts": {one.id: one for pack in stream._packs.packs for one in pack},
        "packs": len(stream._packs),
        "sources": [stream.documents_of(one) for one in stream.last_samples()],
    }
