"""The command that calls mkd here, for the next steps that mkd proposes."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def mkd_command() -> str:
    """Return how to call mkd here: by its name if that is on the path, else with its place or its Python."""
    if shutil.which("mkd"):
        return "mkd"
    beside = Path(sys.executable).with_name("mkd")
    return quoted(beside) if beside.is_file() else f"{quoted(sys.executable)} -m mkd"


def quoted(path: str | Path) -> str:
    """Return a path for a shell, relative to the current folder if it is below."""
    here = Path.cwd()
    path = Path(path)
    return shlex.quote(str(path.relative_to(here) if path.is_absolute() and here in path.parents else path))
