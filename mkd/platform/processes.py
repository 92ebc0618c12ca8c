"""Identify processes of this machine, distinguished from those of other machines and containers."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_space() -> str:
    """Return a name of the space in which process ids are unique: the machine's boot and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_alive(process: int) -> bool:
    """Return True if the process runs in this `process_space`; a zombie does not count."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
