"""Names of files that are being written. They say by whom, so that what a killed process has left can be removed."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mkd.platform.processes import is_alive, process_space

MAX_IDLE_S = 24 * 3600.0  # without a write, for a process of another machine to count as gone
_DRAFT = re.compile(r"\.partial-(?P<place>.+)-(?P<process>\d+)(\.|$)")


def draft_name(name: str) -> str:
    """What `name`, or a prefix of names, is called until it is complete: NAME.partial-HOST-PROCESS."""
    return f"{name}.partial-{_place()}-{os.getpid()}"


def remove_left_behind(name: str) -> None:
    """Remove the drafts of `name`, a path, that nobody writes any more.

    Those of this machine whose process is gone, and any others that have not been written to for a day: on a shared file
    system the process may live on another machine.
    """
    target = Path(name)
    drafts = defaultdict(list)
    for path in target.parent.glob(glob.escape(target.name) + ".partial-*"):
        found = _DRAFT.match(path.name, len(target.name))
        drafts[found and (found["place"], int(found["process"]))].append(path)
    for writer, paths in drafts.items():
        if _is_gone(writer, paths):
            for path in paths:
                with suppress(OSError):
                    path.unlink()


def _is_gone(writer: tuple[str, int] | None, paths: Iterable[Path]) -> bool:
    """`writer`: None where the names do not say it. This very process has just begun: its number was that of an earlier one."""
    if writer is not None and writer[0] == _place() and (writer[1] == os.getpid() or not is_alive(writer[1])):
        return True
    written = [path.stat().st_mtime for path in paths if path.exists()]
    return time.time() - max(written, default=0.0) > MAX_IDLE_S


def _place() -> str:
    """The host, for people, and a digest of where its process ids mean the same."""
    host = re.sub(r"[^\w.]", "_", socket.gethostname(), flags=re.ASCII)
    return f"{host}-{hashlib.sha256(process_space().encode()).hexdigest()[:8]}"
