"""Save checkpoints of one small tensor with the real code, on gloo ranks that may be killed.

Ranks are forked from a clean process.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mkd.checkpoint.folders import Retention, TrainingPosition
from mkd.checkpoint.pickles import read_metadata
from mkd.checkpoint.saving import Contents, Save
from mkd.checkpoint.verifying import choose_checkpoint
from mkd.errors import MkdError
from mkd.operations.phases import Phases
from mkd.parallel.context import ParallelContext
from mkd.platform import Platform, cpu
from tests.fault_injection import fault as injected
from tests.ranks import forking_context

ROWS = 512  # rows of 64 fp32 values, per rank


def run_forked(world_size, function, *args, fault=None, timeout_s=60):
    """Return (exit code, answer) by rank of `function(context, *args)`.

    After an MkdError the answer is the error, and its seconds.
    """
    # a fork of this process would have its locks, but not the threads that hold them
    fork = forking_context()
    with tempfile.TemporaryDirectory() as store:
        pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            fork.Process(target=_rank, args=(rank, world_size, store, pipes[rank][1], fault, function, args))
            for rank in range(world_size)
        ]
        for process, (_, write_end) in zip(processes, pipes, strict=True):
            process.start()
            write_end.close()
        answers = [_receive(read_end, timeout_s) for read_end, _ in pipes]
        for process in processes:
            process.join(timeout_s)
            assert process.exitcode is not None, f"a rank still runs after {timeout_s} s"
    return [(process.exitcode, answer) for process, answer in zip(processes, answers, strict=True)]


def _receive(pipe, timeout_s):
    assert pipe.poll(timeout_s), f"no answer after {timeout_s} s"
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(rank, world_size, store, pipe, fault, function, args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(store) / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    cpu.install()
    context = ParallelContext.create(
        Platform(torch.device("cpu"), "gloo", transformer_engine=False, apex=False)
    )
    start = time.monotonic()
    try:
        with injected(fault):
            pipe.send(function(context, *args))
    except MkdError as error:
        pipe.send((error.report(), time.monotonic() - start))
    pipe.close()
    os._exit(0)


def sharded_tensor(context, name, value, rows=ROWS):
    """Return this rank's part of a tensor."""
    tensor = torch.full((rows, 64), float(value) + context.rank)
    return ShardedTensor.from_rank_offsets(name, tensor, (0, context.rank, context.world_size))


def sharded(context, value):
    """Return a state of one tensor, and one object per rank."""
    return {
        "w": sharded_tensor(context, "w", value),
        "rng": ShardedObject("rng", {"cpu": torch.get_rng_state()}, (context.world_size,), (context.rank,)),
        "step": value,
    }


def new_save(context, directory, iteration, retention=None):
    contents = Contents(TrainingPosition(iteration), {}, None)
    return Save(Path(directory), contents, context, retention or Retention(), Phases().moment)


def save(context, directory, *iterations, retention=None):
    """Save the iterations in turn; the tensor's value is the iteration. Return the last folder."""
    for iteration in iterations:
        folder = (
            new_save(context, directory, iteration, retention)
            .start(sharded(context, iteration), False)
            .write()
            .finish()
        )
    return folder


def choose(context, directory, step=None):
    """Verify fully; return (name of the folder to resume from, value saved in it, messages)."""
    said = []
    folder = choose_checkpoint(Path(directory), step, context, said.append)
    return folder and folder.name, folder and value_in(folder), said


def value_in(folder):
    """Return the first element of the tensor that a checkpoint holds."""
    stored = read_metadata(folder).storage_data
    place = next(place for index, place in stored.items() if index.fqn == "w" and not any(index.offset))
    with open(folder / place.relative_path, "rb") as file:
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), weights_only=True).flatten()[0].item()


def copy(source, folder):
    """Return a private copy of a folder of checkpoints, to damage."""
    return shutil.copytree(source, folder)


@contextmanager
def small_disk(folder, size):
    """Yield a file system of `size` (as in `mount -o size=`) at `folder`; None if mounting is forbidden."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
