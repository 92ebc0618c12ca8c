"""Names of files that are being written.

A name tells the writer, so that the drafts of a killed process can be removed.
"""

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

MAX_IDLE_S = 24 * 3600.0  # seconds without a write after which the writer on another machine counts as gone
_DRAFT = re.compile(r"\.partial-(?P<place>.+)-(?P<process>\d+)(\.|$)")


def draft_name(name: str) -> str:
    """Return the name of `name`, or of a prefix of names, until it is complete: NAME.partial-HOST-PROCESS."""
    return f"{name}.partial-{_place()}-{os.getpid()}"


def remove_left_behind(name: str) -> None:
    """Remove the abandoned drafts of the path `name`.

    A draft of this machine is abandoned when its process is gone. Any other is abandoned after a day without
    a write, because on a shared file system its process may run on another machine.
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
    """Return True if the writer of the drafts `paths` is gone; `writer` is None if the names do not tell.

    Drafts with this process's own id belong to an earlier process: this one has only just begun.
    """
    if writer is not None and writer[0] == _place() and (writer[1] == os.getpid() or not is_alive(writer[1])):
        return True
    written = [path.stat().st_mtime for path in paths if path.exists()]
    return time.time() - max(written, default=0.0) > MAX_IDLE_S


def _place() -> str:
    """Return the host, for people, and a digest of the process-id namespace."""
    host = re.sub(r"[^\w.]", "_", socket.gethostname(), flags=re.ASCII)
    return f"{host}-{hashlib.sha256(process_space().encode()).hexdigest()[:8]}"
