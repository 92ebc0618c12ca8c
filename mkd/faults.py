"""Faults on purpose, for tests of reliability: `MKD_FAULT="kind@point[:rank][:step]"`. Without it nothing happens here.

    MKD_FAULT="kill@before_pointer:0:10"    rank 0 is killed when it saves iteration 10, just before the pointer moves

An empty rank (`kill@mid_shard::10`) stands for any. Kinds: `kill` (SIGKILL), `stop` (SIGSTOP), `enospc` and `eio` (the
OSError of a full or a broken disk), `error` (a RuntimeError), `oom` (torch's OutOfMemoryError), `exit` (without a word),
`hang`. Two are left to the caller: `nan` (make a gradient NaN) and `skip` (leave a collective out).
"""

from __future__ import annotations

import errno
import math
import os
import signal
import threading

VARIABLE = "MKD_FAULT"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRNOS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
LEFT_TO_CALLER = ("nan", "skip")


def fault_at(point: str, rank: int, step: int) -> bool:
    """Fail here if the environment asks for it; True where the caller has to do it. Points: where a save or a step stands."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return False
    kind, _, place = wanted.partition("@")
    name, only_rank, only_step, *_ = *place.split(":"), "", ""
    if name != point or only_rank not in ("", str(rank)) or only_step not in ("", str(step)):
        return False
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRNOS:
        raise OSError(ERRNOS[kind], f"{os.strerror(ERRNOS[kind])} ({wanted})")
    elif kind == "exit":
        os._exit(1)
    elif kind == "hang":
        threading.Event().wait()
    elif kind == "oom":
        raise _out_of_memory(wanted)
    elif kind not in LEFT_TO_CALLER:
        raise RuntimeError(wanted)
    return kind in LEFT_TO_CALLER


def poison_next_gradient(parameters) -> None:
    """Make the gradient that the first vector among `parameters` gets next NaN, on this rank alone."""
    parameter = next(one for one in parameters if one.dim() == 1 and one.requires_grad)

    def poison(gradient):
        handle.remove()
        return gradient * math.nan

    handle = parameter.register_hook(poison)


def _out_of_memory(wanted: str) -> Exception:
    import torch

    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({wanted})")
