"""What the proof of a checkpoint costs: `python -m tests.checkpoint.save_cost [--megabytes 256] [--folder DIR] [--turns 41]`.

Median seconds of saves by one rank and by two, of the same saves without fsync and without hashing too, and of Megatron's
own writer, which waits for the disk as well. All in turns, forwards and backwards, so that what else the machine does
meets all alike. A disk's speed drifts by more than a proof costs, so its share is taken within a turn: the median over turns.
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
    """One save by mkd, with parts of the proof left out."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        new_save(context, folder, 1).start(state, copied=False).write().finish()


def megatrons(context, folder, state):
    """The same by Megatron's own writer, which waits for the disk but hashes nothing."""
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
    """Of one save in a new folder, begun when the disk has no work left."""
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
    """s of each save of each arm, in turns, and of verifications."""
    seconds = {name: [] for name in (*ARMS, "verified")}
    for turn in range(turns):
        for name in (ARMS, reversed(ARMS))[turn % 2]:
            seconds[name].append(seconds_of(ARMS[name], context, folder / name, megabytes))
        start = time.monotonic()
        verify(folder / "proven" / "iter_0000001", context, print)
        seconds["verified"].append(time.monotonic() - start)
    for process in multiprocessing.active_children():  # Megatron's writer leaves one behind
        process.terminate()
    return seconds


def seconds_by_arm(ranks: int, folder: Path, megabytes: int, turns: int = TURNS) -> dict[str, list[float]]:
    """s of each turn, as rank 0 sees them: a save ends when all have written."""
    (_, seconds), *_ = run_forked(ranks, measure, folder / str(ranks), megabytes, turns, timeout_s=900)
    return seconds


def share_of_proof(seconds: dict[str, list[float]]) -> float:
    """Hashing and fsync, as a share of the time of a save: the median over turns. `seconds` as of `seconds_by_arm`."""
    return median(
        1 - bare / proven
        for proven, bare in zip(seconds["proven"], seconds["without hashing too"], strict=True)
    )


def line(ranks: int, megabytes: int, seconds: dict[str, list[float]]) -> str:
    proven, unsynced, bare, others, verified = (median(seconds[name]) for name in (*ARMS, "verified"))
    return (
        f"{ranks} x {megabytes} MB: saved in {proven:.3f} s, without fsync in {unsynced:.3f} s, without hashing too in "
        f"{bare:.3f} s: hashing and fsync {share_of_proof(seconds):.1%}; by Megatron in {others:.3f} s: "
        f"{proven / others:.2f} of it; verified in {verified:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=256, help="of tensors, a rank (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to save: on the disk that is meant (default: that of TMPDIR)"
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="saves of each kind (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for ranks in (1, 2):
            seconds = seconds_by_arm(ranks, Path(folder), args.megabytes, args.turns)
            print(line(ranks, args.megabytes, seconds), flush=True)


if __name__ == "__main__":
    main()
