"""What the proof of a checkpoint costs: `python -m tests.checkpoint.save_cost [--megabytes 256] [--folder DIR]`.

Median seconds of saves by one rank and by two, of the same saves without hashing and without waiting for the disk, and
of Megatron's own writer, which does wait for it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from megatron.core import dist_checkpointing

from mkd.checkpoint.folders import Retention
from mkd.checkpoint.verifying import verify
from tests.checkpoint.tiny_saves import new_save, run_forked, sharded_tensor

ROW_BYTES = 256
TENSORS = 16
SAVES = 3
TURNS = 3


def without_hashing():
    nothing = SimpleNamespace(update=lambda data: None, hexdigest=lambda: "")
    return mock.patch("hashlib.sha256", lambda *_: nothing)


def without_fsync():
    return mock.patch("os.fsync", lambda descriptor: None)


def seconds_of_saves(context, folder, megabytes, *patches):
    """The seconds of each of `SAVES` saves, with parts of the proof left out."""
    rows = megabytes * 10**6 // ROW_BYTES // TENSORS
    state, seconds = {str(i): sharded_tensor(context, str(i), i, rows) for i in range(TENSORS)}, []
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for iteration in range(1, SAVES + 1):
            dist.barrier()
            start = time.monotonic()
            new_save(context, folder, iteration, Retention(1)).start(state, copied=False).write().finish()
            seconds.append(time.monotonic() - start)
    return seconds


def seconds_of_megatrons_saves(context, folder, megabytes):
    """The same by Megatron's own writer, which waits for the disk but hashes nothing."""
    rows, seconds = megabytes * 10**6 // ROW_BYTES // TENSORS, []
    for _ in range(SAVES):
        state = {str(i): sharded_tensor(context, str(i), i, rows) for i in range(TENSORS)}
        if context.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        start = time.monotonic()
        dist_checkpointing.save(state, str(folder))
        seconds.append(time.monotonic() - start)
    return seconds


def measure(context, folder, megabytes):
    """Median s of (a save, one without hashing, one without fsync too, one by Megatron, a verification), in turns."""
    proven, unhashed, bare, others, verified = [], [], [], [], []
    for _ in range(TURNS):
        proven += seconds_of_saves(context, folder, megabytes)
        start = time.monotonic()
        verify(folder / f"iter_{SAVES:07d}", context, print)
        verified.append(time.monotonic() - start)
        unhashed += seconds_of_saves(context, folder, megabytes, without_hashing())
        bare += seconds_of_saves(context, folder, megabytes, without_hashing(), without_fsync())
        others += seconds_of_megatrons_saves(context, folder / "megatron", megabytes)
    for process in multiprocessing.active_children():  # Megatron's writer leaves one behind
        process.terminate()
    return tuple(map(median, (proven, unhashed, bare, others, verified)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of tensors, a rank (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save: on the disk that is meant (default: that of TMPDIR)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        for ranks in (1, 2):
            outcomes = run_forked(ranks, measure, folder / str(ranks), args.megabytes, timeout_s=600)
            columns = zip(*(answer for _, answer in outcomes), strict=True)
            save_s, unhashed_s, bare_s, other_s, verify_s = map(max, columns)
            print(
                f"{ranks} x {args.megabytes} MB: saved in {save_s:.2f} s, without hashing in {unhashed_s:.2f} s, without fsync "
                f"too in {bare_s:.2f} s, by Megatron in {other_s:.2f} s; verified in {verify_s:.2f} s",
                flush=True,
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
