"""Measure the cost of a checkpoint's proof.

    python -m tests.checkpoint.save_cost [--megabytes 256] [--folder DIR] [--turns 41]

Print median seconds of saves by one rank and by two ranks. Compare them with the same saves without fsync,
without fsync and hashing, and by Megatron's own writer, which also waits for the disk. Saves take turns,
forwards and backwards, so that other load on the machine affects all alike. A disk's speed drifts by more
than a proof costs. The proof's share is therefore computed within each turn; the median over turns is shown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from megatron.core import dist_checkpointing

from mkd.checkpoint.verifying import verify
from tests.checkpoint.tiny_saves import new_save, run_forked, sharded_tensor

ROW_BYTES = 256
TENSORS = 16
TURNS = 41


def without_hashing():
    nothing = SimpleNamespace(update=lambda data: None, hexdigest=lambda: "")
    return mock.patch("hashlib.sha256", lambda *_: nothing)


def without_fsync():
    return mock.patch("os.fsync", lambda descriptor: None)


def ours(context, folder, state, patches=()):
    """Save with mkd, with parts of the proof left out."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        new_save(context, folder, 1).start(state, copied=False).write().finish()


def megatrons(context, folder, state):
    """Save with Megatron's own writer, which waits for the disk but hashes nothing."""
    if context.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))


ARMS = {
    "proven": ours,
    "without fsync": partial(ours, patches=(without_fsync,)),
    "without hashing too": partial(ours, patches=(without_fsync, without_hashing)),
    "by Megatron": megatrons,
}


def seconds_of(save, context, folder, megabytes) -> float:
    """Return the seconds of one save in a new folder, started when the disk has no work left."""
    rows = megabytes * 10**6 // ROW_BYTES // TENSORS
    state = {str(i): sharded_tensor(context, str(i), i, rows) for i in range(TENSORS)}
    if context.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()
    start = time.monotonic()
    save(context, folder, state)
    return time.monotonic() - start


def measure(context, folder, megabytes, turns) -> dict[str, list[float]]:
    """Return the seconds of each save of each arm, in turns, and of verifications."""
    seconds = {name: [] for name in (*ARMS, "verified")}
    for turn in range(turns):
        for name in (ARMS, reversed(ARMS))[turn % 2]:
            seconds[name].append(seconds_of(ARMS[name], context, folder / name, megabytes))
        start = time.monotonic()
        verify(folder / "proven" / "iter_0000001", context, print)
        seconds["verified"].append(time.monotonic() - start)
    for process in multiprocessing.active_children():  # Megatron's writer leaves a process behind
        process.terminate()
    return seconds


def seconds_by_arm(ranks: int, folder: Path, megabytes: int, turns: int = TURNS) -> dict[str, list[float]]:
    """Return the seconds of each turn, measured on rank 0: a save ends when all ranks have written."""
    (_, seconds), *_ = run_forked(ranks, measure, folder / str(ranks), megabytes, turns, timeout_s=900)
    return seconds


def share_of_proof(seconds: dict[str, list[float]]) -> float:
    """Return the share of hashing and fsync in the time of a save: the median over turns.

    `seconds` is the result of `seconds_by_arm`.
    """
    return median(
        1 - bare / proven
        for proven, bare in zip(seconds["proven"], seconds["without hashing too"], strict=True)
    )


def line(ranks: int, megabytes: int, seconds: dict[str, list[float]]) -> str:
    proven, unsynced, bare, others, verified = (median(seconds[name]) for name in (*ARMS, "verified"))
    return (
        f"{ranks} x {megabytes} MB: saved in {proven:.3f} s, without fsync in {unsynced:.3f} s, "
        f"without hashing too in {bare:.3f} s: hashing and fsync {share_of_proof(seconds):.1%}; "
        f"by Megatron in {others:.3f} s: "
        f"{proven / others:.2f} of it; verified in {verified:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=256, help="megabytes of tensors per rank (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: that of TMPDIR)")
    parser.add_argument("--turns", type=int, default=TURNS, help="saves of each arm (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for ranks in (1, 2):
            seconds = seconds_by_arm(ranks, Path(folder), args.megabytes, args.turns)
            print(line(ranks, args.megabytes, seconds), flush=True)


if __name__ == "__main__":
    main()
