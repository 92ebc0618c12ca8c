"""Start real training processes, one per rank, for tests in which some of them die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.fault_injection import environment

ROOT = Path(__file__).parents[2]
STRAGGLER_S = 12.0


@dataclass(frozen=True)
class Ended:
    """End of one rank."""

    code: int  # exit code, or -signal
    after_s: float  # s after the first rank ended
    at: float  # s since the epoch
    output: str


def run_processes(
    folder: Path,
    argv: list[str],
    processes: int,
    timeout_s: float = 240,
    machines: Sequence[Path] = (),  # folder where each rank starts, for relative paths
    fault: str = "",  # see tests/fault_injection.py
    more: Mapping[int, Sequence[str]] = MappingProxyType({}),  # flags of some ranks alone
    on_gpus: bool = False,  # each rank has a GPU
) -> list[Ended]:
    """Run `pretrain_kd.py argv` on every rank of a world until all have ended.

    Ranks that still run `STRAGGLER_S` after the first one's end are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank in range(processes):
        own = {
            **os.environ,
            **world,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            **({} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            **environment(fault),
        }
        with (folder / f"rank-{rank}.out").open("w") as output:
            command = [sys.executable, str(ROOT / "pretrain_kd.py"), *argv, *more.get(rank, ())]
            place = machines[rank] if machines else None
            started.append(
                subprocess.Popen(command, env=own, cwd=place, stdout=output, stderr=subprocess.STDOUT)
            )
    ends: dict[int, float] = {}
    deadline = time.monotonic() + timeout_s
    while len(ends) < processes and time.monotonic() < deadline:
        ends |= {r: time.time() for r, one in enumerate(started) if r not in ends and one.poll() is not None}
        if ends:
            deadline = min(deadline, time.monotonic() + min(ends.values()) + STRAGGLER_S - time.time())
        time.sleep(0.02)
    for process in started:
        process.kill()
        process.wait()
    at = [ends.get(rank, time.time()) for rank in range(processes)]
    return [
        Ended(process.returncode, at[rank] - min(at), at[rank], (folder / f"rank-{rank}.out").read_text())
        for rank, process in enumerate(started)
    ]
