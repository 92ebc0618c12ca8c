"""Remember which exports a run wrote: on resume it may replace those, and no others.

SAVE/exports.json: absolute folder -> name -> [[bytes, time of the last change in ns], ...]

A file in a folder is the run's own if its size and time are listed. The list is written before the files get
their names, so that it also covers an export that was killed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from mkd.checkpoint.hf.hf_folder import model_files

EXPORTS_FILE = "exports.json"
Listed = dict[str, list[list[int]]]


@dataclass(frozen=True)
class OwnExports:
    """The list of one --save folder."""

    save: Path

    def has_written(self, folder: Path) -> bool:
        """Return True if every file of the model in `folder` is this run's own."""
        listed = self._read().get(_key(folder), {})
        return all(_state(path) in listed.get(path.name, ()) for path in model_files(folder))

    def record(self, folder: Path, stage: Path) -> None:
        """List the files in `stage`, which are about to be moved to `folder`, and those already there."""
        exports, key = self._read(), _key(folder)
        earlier: Listed = exports.get(key, {})
        listed: Listed = {path.name: [_state(path)] for path in stage.iterdir()}
        for path in model_files(folder):
            if _state(path) in earlier.get(path.name, ()):
                listed.setdefault(path.name, []).append(_state(path))
        draft = self.save / (EXPORTS_FILE + ".new")
        draft.write_text(json.dumps({**exports, key: listed}) + "\n", encoding="utf-8")
        os.replace(draft, self.save / EXPORTS_FILE)

    def _read(self) -> dict[str, Listed]:
        try:
            content = json.loads((self.save / EXPORTS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # there is none
            return {}
        return content if isinstance(content, dict) else {}


def _key(folder: Path) -> str:
    return str(folder.resolve())


def _state(path: Path) -> list[int]:
    """Return [bytes, time of the last change in ns]; of a folder the name alone counts."""
    status = path.lstat()  # mkd writes no links, so a link, dangling or not, is never its own
    return [0, 0] if S_ISDIR(status.st_mode) else [status.st_size, status.st_mtime_ns]
