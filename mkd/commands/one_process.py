"""Commands that run in one process refuse to be started by torchrun."""

from __future__ import annotations

import os

from mkd.errors import UsageError


def require_one_process(command: str, do: str = "") -> None:
    """Raise UsageError if torchrun or another launcher has started several processes of `command`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = f"mkd {command} runs in one process, and torchrun has started several"
        why, do = "all would write the same folder", do or "run it without torchrun"
        error = UsageError(what, why, do, code="number-of-processes")
        error.on_all_ranks = True
        raise error
