"""Faults on purpose, for tests of reliability: `MKD_FAULT="kind@point[:rank][:step]"`. Without it nothing happens here.

    MKD_FAULT="kill@before_pointer:0:10"    rank 0 is killed when it saves iteration 10, just before the pointer moves

An empty rank (`kill@mid_shard::10`) stands for any. Kinds: `kill` (SIGKILL), `stop` (SIGSTOP), `enospc` and `eio` (the
OSError of a full or a broken disk), `error` (a RuntimeError).
"""

from __future__ import annotations

import errno
import os
import signal

VARIABLE = "MKD_FAULT"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRNOS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


def fault_at(point: str, rank: int, step: int) -> None:
    """Fail here if the environment asks for it. Points: where a save or a step stands, such as `before_pointer`."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    kind, _, place = wanted.partition("@")
    name, only_rank, only_step, *_ = *place.split(":"), "", ""
    if name != point or only_rank not in ("", str(rank)) or only_step not in ("", str(step)):
        return
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRNOS:
        raise OSError(ERRNOS[kind], f"{os.strerror(ERRNOS[kind])} ({wanted})")
    else:
        raise RuntimeError(wanted)
