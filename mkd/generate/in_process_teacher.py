"""Completions by the teacher in this process and others, with the sampler of rollouts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mkd.chat.generation import Generation
from mkd.chat.writer import Writer, writer_of
from mkd.errors import MkdError, OutOfMemory, UsageError
from mkd.generate.generate_job import Job
from mkd.generate.selection import Index
from mkd.human import counted, tokens_per_s
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout
from mkd.parallel.agreement import agree, together
from mkd.parallel.context import ParallelContext

LOG = logging.getLogger("mkd")
LINE_S = 30.0  # between lines about progress
WAIT = timedelta(days=7)  # of processes that have finished, for the others


def run_here(job: Job, context: ParallelContext) -> None:
    """Sample what is missing, then select and write. Collective."""
    # Made now: in the end, processes wait for each other longer than NCCL may.
    group = dist.new_group(backend="gloo", timeout=WAIT) if context.world_size > 1 else None
    is_leader = context.tp_rank == context.pp_rank == 0  # of the processes with one copy of the teacher
    calls = job.reward_calls() if is_leader else None
    together(calls.start if calls else _nothing, not_writable)
    index = together(lambda: Index.read(job.folder.path), not_writable)
    agree(None)  # all have read the journals: they may grow now
    if index.known:
        LOG.info(f"{counted(len(index.known), 'completion')} of an earlier start are kept")
    size, rank = context.dp_size, context.dp_rank
    begin, tokens = time.perf_counter(), 0
    judge = job.judge(calls, context.rank) if is_leader else None
    try:
        if judge is not None:
            job.judge_again(index, judge, rank, size)
        if job.missing(index):  # else no process needs the weights
            with _memory_explained():
                writer = writer_of(job.reader, context)
            for rollout in _completed(writer, job.missing(index, rank, size), job.settings.generation):
                if judge is not None:
                    tokens += len(rollout.ids)
                    job.add(rollout, judge)
        if judge is not None:
            judge.close()
    finally:
        if judge is not None:
            judge.stop()
    mine = tokens, time.perf_counter() - begin
    work = [mine] * context.world_size
    if group is not None:
        dist.all_gather_object(work, mine, group=group)
    if context.rank == 0:
        job.finish(work)
    agree(None)


def _completed(writer: Writer, requests: Sequence[Request], generation: Generation) -> Iterator[Rollout]:
    """Yield completions as they end. A line tells the progress of this process now and then. Collective."""
    begin = shown = time.perf_counter()
    done = tokens = 0
    with _memory_explained():
        for row in writer.stream(requests, generation):
            tokens += len(row.tokens)
            for place in list(row.done):
                done += 1
                yield row.done.pop(place)
            if (now := time.perf_counter()) - shown > LINE_S:
                shown, rate = now, tokens_per_s(tokens, now - begin)
                completions = f"{done:,} of {len(requests):,} completions of this process"
                LOG.info(f"{completions}, {counted(tokens, 'token')}, {rate}")


@contextmanager
def _memory_explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"the GPU has too little memory for the teacher and the keys and values of its texts: {error}"
        do = "lower --slots or --max-new-tokens, or split the teacher: --tensor-model-parallel-size N"
        raise OutOfMemory(what.splitlines()[0], "", do, code="out-of-gpu-memory") from error


def _nothing() -> None:
    return None


def not_writable(error: Exception) -> MkdError:
    """Return the error for a folder that cannot be read or written."""
    what = f"{type(error).__name__}: {error}"
    return UsageError(what, "", "check the folder of --out", code="not-writable")
