"""Provide a pool of ranks for tests: processes start once and serve many tests.

Importing torch and Megatron takes seconds, so ranks on CPUs are forked from a process that has done so.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# more than 1: layouts of many ranks on few GPUs, slower
RANKS_PER_GPU = int(os.environ.get("MKD_RANKS_PER_GPU", "1"))


def skip_unless_gpus_take(ranks: int) -> None:
    """Skip the calling test if the machine has too few GPUs."""
    import pytest
    import torch

    if ranks > torch.cuda.device_count() * RANKS_PER_GPU:
        pytest.skip(f"needs {ranks} GPUs, or MKD_RANKS_PER_GPU")


class RanksDidNotMeet(AssertionError):
    """Raised if the process group did not form: no rank called the function."""


class RankPool:
    """Call a module-level function on ranks 0 .. world_size-1: `run(function, world_size, *args)`.

    Ranks are CPU processes that talk through gloo. With `on_gpus` each has a separate GPU, or a share of one
    (MKD_RANKS_PER_GPU), and they talk through NCCL.
    """

    def __init__(self, timeout_s: float = 240.0, on_gpus: bool = False):
        self.timeout_s, self.on_gpus = timeout_s, on_gpus
        self._workers: list[tuple[multiprocessing.Process, multiprocessing.connection.Connection]] = []

    def run(self, function, world_size: int, *args) -> list:
        """Return the results of `function(*args)` by rank, with torch.distributed initialised.

        A failing rank raises AssertionError with the tracebacks. If a rank has ended or does not answer, and
        always on GPUs, the pool restarts. If the ranks did not even meet, because another process used one of
        their ports, the pool restarts by itself once.
        """
        try:
            return self._run(function, world_size, args)
        except RanksDidNotMeet:
            return self._run(function, world_size, args)

    def _run(self, function, world_size: int, args: tuple) -> list:
        self._grow(world_size)
        file, name = inspect.getsourcefile(inspect.unwrap(function)), function.__qualname__
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                self._workers[rank][1].send((file, name, args, rank, world_size, str(Path(folder) / "store")))
            return self._collect(world_size)

    def _collect(self, world_size: int) -> list:
        results: dict[int, object] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(results) + len(failures) < world_size and time.monotonic() < deadline:
            for rank in set(range(world_size)) - results.keys() - failures.keys():
                process, pipe = self._workers[rank]
                try:
                    answer = pipe.recv() if pipe.poll(0.005) else None
                except (EOFError, OSError):  # its end of the pipe closes when the process ends
                    process.join(5.0)
                    answer = (False, f"process ended with exit code {process.exitcode}")
                if answer is not None:
                    ok, value = answer
                    (results if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures or len(results) < world_size:
            answered = len(results) + len(failures) == world_size
            did_not_meet = any(RanksDidNotMeet.__name__ in text for text in failures.values())
            is_whole = (
                answered and not did_not_meet and all(process.is_alive() for process, _ in self._workers)
            )
            if self.on_gpus or not is_whole:  # an error on a GPU may have corrupted its context
                self.close()
            texts = [f"rank {rank} of {world_size} failed:\n{text}" for rank, text in failures.items()]
            raise (RanksDidNotMeet if did_not_meet else AssertionError)(
                "\n".join(texts) or f"no answer within {self.timeout_s} s"
            )
        return [results[rank] for rank in range(world_size)]

    def _grow(self, world_size: int) -> None:
        # Forked ranks share one seed of hashes. With the slow tests each has its own, so that orders of sets
        # that differ between ranks are found.
        spawns = self.on_gpus or os.environ.get("MKD_SLOW") == "1"
        context = multiprocessing.get_context("spawn") if spawns else forking_context()
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, len(self._workers), self.on_gpus), daemon=False
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()


def forking_context() -> multiprocessing.context.BaseContext:
    """Return a context whose processes are forked from one that has imported tests/rank_imports.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_imports"])
    own = {name: os.environ.get(name) for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [own["PYTHONPATH"]])])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has looked for GPUs cannot be forked
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in own.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return context


def _serve(pipe, index: int, on_gpu: bool) -> None:
    """Run one worker: answer calls until the pipe closes."""
    sys.path.insert(0, str(REPOSITORY))
    if on_gpu:
        os.environ["LOCAL_RANK"] = str(index)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # As in torchrun's processes: workers of --num-workers would import everything anew, for 10 s each.
        multiprocessing.set_start_method("fork", force=True)
    poison_freed_memory()
    import torch

    from mkd.platform import detect

    if on_gpu and RANKS_PER_GPU > 1:  # NCCL refuses two ranks of one host on one GPU
        os.environ["NCCL_HOSTID"] = str(index // torch.cuda.device_count())
    detect()  # before Megatron is imported
    torch.set_num_threads(1)
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (True, _call(*call))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except BrokenPipeError:
            os._exit(0)


def poison_freed_memory() -> None:
    """Make every byte of memory 0xff once it is freed, a NaN in fp32 and bf16. Needs glibc.

    What is read after it was freed, as a message that is still being sent, is then NaN and no old value.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        perturb, mmap_threshold, largest = -6, -3, 32 << 20  # of malloc.h; pages of a mapping are not filled
        assert mallopt(perturb, 0xFF) and mallopt(mmap_threshold, largest), "glibc refuses the settings"


def _call(file: str, name: str, args: tuple, rank: int, world_size: int, store: str):
    import torch.distributed as dist
    from megatron.core import parallel_state

    _meet(rank, world_size, store)
    try:
        return getattr(_module(file), name)(*args)
    finally:
        free_graphs()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()  # cycles keep groups alive, and gloo has some polling threads for each of them
        gc.freeze()  # what is left are modules: the next call need not look at them


def free_graphs() -> None:
    """Free the CUDA graphs of contexts that a test left open: NCCL waits for graphs that have work of it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        for one in gc.get_objects():
            if issubclass(type(one), torch.cuda.CUDAGraph):
                one.reset()


def _meet(rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        dist.barrier()
    except RuntimeError as error:
        raise RanksDidNotMeet(str(error)) from error


def _module(file: str):
    name = "ranks_of_" + "_".join(Path(file).relative_to(REPOSITORY).with_suffix("").parts)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
