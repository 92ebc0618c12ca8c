"""Distil a teacher into a student: `mkd train`, and `pretrain_kd.py` in a checkout."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Train, then end the process with the exit code instead of returning it: see `leave`."""
    from mkd.run.main import leave
    from mkd.run.main import main as train

    leave(train(list(sys.argv[1:] if argv is None else argv), signals_afterwards=signal.SIG_IGN))
