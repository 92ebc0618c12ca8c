"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "MKD_LAUNCHER"
"""Environment variable of processes that mkd itself has started: the process that did."""
STAGE = "MKD_STAGE"
"""Environment variable of the commands of `mkd distill` and `mkd quickstart`: those say what comes next."""
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent is gone


def die_with_parent() -> None:
    """Let the system kill this process when the thread that started it is gone. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_launcher() -> None:
    """If mkd has started this process, let it not outlive that launcher.

    After a kill -9 of the launcher, the same command can then start again in the same folder.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        die_with_parent()
        if os.getppid() != int(launcher):  # it was gone before
            os._exit(1)
