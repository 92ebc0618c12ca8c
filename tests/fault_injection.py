"""Inject faults into a run, for tests of reliability: `MKD_FAULT="kind@point[:rank][:step]"`.

MKD_FAULT="kill@before_pointer:0:10"    kill rank 0 when it saves iteration 10, just before the pointer moves

An empty rank (`kill@mid_shard::10`) means any rank. Points are the phases `POINTS` of a step, the moments of
a save (see mkd.operations.phases and mkd.checkpoint.saving), and `in_gather`: in a step, when peers gather
the second layer of a teacher. Kinds: `kill` (SIGKILL), `stop` (SIGSTOP), `enospc` and `eio` (the OSError of a
full or a broken disk), `error` (a RuntimeError), `oom` (torch's OutOfMemoryError), `memory` (a MemoryError),
`exit` (without a report), `hang`, `pause` (once, for PAUSE_S), `nan` (make a gradient NaN) and `skip` (leave
out the exchange of the stopper).

`fault` injects into this process. Real processes have the fault if they are started with `environment`, whose
PYTHONPATH leads to tests/fault_site/sitecustomize.py.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from mkd.operations.phases import (
    DATA,
    END,
    FORWARD_BACKWARD,
    OPTIMIZER,
    READING,
    ROLLOUT,
    WAITING,
    Follower,
    Phases,
)

VARIABLE = "MKD_FAULT"
SITE = Path(__file__).resolve().parent / "fault_site"
PAUSE_S = 75.0
POINTS = {
    READING: "in_reading",  # of the data, at the start
    DATA: "in_data",
    ROLLOUT: "in_rollout",
    FORWARD_BACKWARD: "in_step",  # on a teacher's own process, a row: their numbers are steps
    OPTIMIZER: "in_optimizer",
    WAITING: "in_waiting",
    END: "in_end",
}
GATHER = "in_gather"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRNOS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


class Injector(Follower):
    """Inject a fault where the text of `VARIABLE` says."""

    def __init__(self, text: str):
        self.text = text
        self.kind, _, place = text.partition("@")
        self.point, self.rank, self.step, *_ = *place.split(":"), "", ""

    def entered(self, phase: str, iteration: int) -> None:
        if phase in POINTS:
            self.passed(POINTS[phase], iteration)
        if phase == FORWARD_BACKWARD and self.is_here(GATHER, iteration):
            fail_in_gather(self.fail)

    def passed(self, moment: str, iteration: int) -> None:
        if self.is_here(moment, iteration):
            self.fail()

    def is_here(self, moment: str, iteration: int) -> bool:
        is_now = moment == self.point and self.step in ("", str(iteration))
        return is_now and self.rank in ("", str(own_rank()))

    def fail(self) -> None:
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind in ERRNOS:
            raise OSError(ERRNOS[self.kind], f"{os.strerror(ERRNOS[self.kind])} ({self.text})")
        elif self.kind == "exit":
            os._exit(1)
        elif self.kind == "hang":
            threading.Event().wait()
        elif self.kind == "pause":
            time.sleep(PAUSE_S)
            self.kind = "paused"
        elif self.kind == "paused":
            return  # reading announces every piece
        elif self.kind == "oom":
            raise out_of_memory(self.text)
        elif self.kind == "memory":
            raise MemoryError(self.text)
        elif self.kind == "nan":
            poison_next_step()
        elif self.kind == "skip":
            skip_next_exchange()
        else:
            raise RuntimeError(self.text)


def own_rank() -> int:
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    if not dist.is_initialized() or dist.get_world_size() < int(os.environ.get("WORLD_SIZE", "1")):
        return rank  # with several sides, the process group has those of one
    return dist.get_rank()


def environment(text: str) -> dict[str, str]:
    """Return the variables of a Python process that has the fault; {} for no fault."""
    if not text:
        return {}
    paths = [str(SITE), str(SITE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {VARIABLE: text, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def fault(text: str | None) -> Iterator[None]:
    """Inject the fault into runs of this process inside; None: no fault."""
    plain = Phases.enter, Phases.moment
    if text:
        install(text)
    try:
        yield
    finally:
        Phases.enter, Phases.moment = plain


def install(text: str) -> None:
    """Let an injector follow every run of this process, after its other followers."""
    injector = Injector(text)
    for name, method in (("enter", injector.entered), ("moment", injector.passed)):
        setattr(Phases, name, _followed_by(getattr(Phases, name), method))


def _followed_by(announce, method):
    @functools.wraps(announce)
    def announce_and_inject(self: Phases, name: str, iteration: int) -> None:
        announce(self, name, iteration)
        method(name, iteration)

    return announce_and_inject


def fail_in_gather(fail) -> None:
    """Call `fail` when peers gather the second of the next layers, before this rank joins them."""
    from mkd.models.placed.residency import PeerWeights

    bring, gathers = PeerWeights.bring, itertools.count(1)

    def bring_or_fail(self: PeerWeights, buffer) -> None:
        if next(gathers) == 2:
            fail()
        bring(self, buffer)

    PeerWeights.bring = bring_or_fail


def poison_next_step() -> None:
    """Make one gradient NaN in this step, on this rank alone.

    It is the gradient that the first vector of the last model part gets.
    """
    from mkd.train.optimizer import StudentOptimizer

    zero_grad = StudentOptimizer.zero_grad

    def zero_and_poison(self: StudentOptimizer) -> None:
        StudentOptimizer.zero_grad = zero_grad
        zero_grad(self)
        parameters = self.stages[-1].parameters()
        parameter = next(one for one in parameters if one.dim() == 1 and one.requires_grad)

        def poison(gradient):
            handle.remove()
            return gradient * math.nan

        handle = parameter.register_hook(poison)

    StudentOptimizer.zero_grad = zero_and_poison


def skip_next_exchange() -> None:
    """Let this rank decide about its step without the all-reduce that the other ranks wait in."""
    from mkd.operations import stopping

    dist = stopping.dist

    def skip(*args, **kwargs) -> None:
        stopping.dist = dist

    stopping.dist = SimpleNamespace(all_reduce=skip, ReduceOp=dist.ReduceOp)


def out_of_memory(text: str) -> Exception:
    import torch

    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({text})")
