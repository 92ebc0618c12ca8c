"""Processes of this machine, told from those of others."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_space() -> str:
    """Where process ids mean the same: this boot of this machine, and in it this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_alive(process: int) -> bool:
    """Whether there is such a process in this `process_space`; one that has ended and waits for its parent is none."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
