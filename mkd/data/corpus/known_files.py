"""Facts about the contents of large files, remembered for as long as the files stay the same.

Reading a corpus of gigabytes at every start would take minutes. A fact (its SHA-256, its largest token) is
found once and kept in the cache folder, with size, times and inode of the file at that time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mkd.data.corpus.drafts import draft_name

FOLDER = "known_files"
BLOCK_BYTES = 1 << 22
SETTLED_S = 2.0  # a file changed more recently may change again with the same times: nothing is kept


class KnownFiles:
    """The facts that are kept in a cache folder. Without a folder, and in a read-only one, none are kept."""

    def __init__(self, cache_dir: str | Path | None):
        self._folder = Path(cache_dir) / FOLDER if cache_dir is not None else None

    def fact(self, path: str | Path, name: str, find: Callable[[], Any]) -> Any:
        """Return `find()`, a JSON value that depends on the content of the file `path` alone.

        `find` is called unless the file has the same size, times (of content and of inode) and inode as when
        the fact was kept. A program can set the first time back, but not the second.
        """
        state = _state(path)
        known = self._read(path)
        if known.get("state") != state:
            known = {"path": os.path.abspath(path), "state": state, "facts": {}}
        if name not in known["facts"]:
            known["facts"][name] = find()
            if _state(path) == state and time.time_ns() - max(state[1:3]) > SETTLED_S * 1e9:
                self._write(path, known)
        return known["facts"][name]

    def keep(self, path: str | Path, name: str, value: Any) -> None:
        """Keep a fact about a file that this process has just written."""
        self._write(path, {"path": os.path.abspath(path), "state": _state(path), "facts": {name: value}})

    def sha256(self, path: str | Path, progress: Callable[[], None] = lambda: None) -> str:
        """Return the SHA-256 of a file; `progress` is called often if the file is read, and may raise."""
        return self.fact(path, "sha256", lambda: sha256_of_file(path, progress))

    def content_hash(
        self,
        settings: Sequence[object],
        paths: Sequence[str | Path],
        progress: Callable[[], None] = lambda: None,
    ) -> str:
        """Return the SHA-256 over `settings` (JSON) and the content of files, without names and times."""
        files = [self.sha256(path, progress) for path in paths]
        return hashlib.sha256(json.dumps([list(settings), files]).encode()).hexdigest()

    def _note(self, path: str | Path) -> Path:
        """Return the file that keeps the facts about `path`; one that cannot exist without a folder."""
        name = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()
        return (self._folder or Path(os.devnull)) / f"{name[:32]}.json"

    def _read(self, path: str | Path) -> dict[str, Any]:
        try:
            found = json.loads(self._note(path).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) and isinstance(found["facts"], dict) else {}
        except (OSError, ValueError, KeyError):
            return {}

    def _write(self, path: str | Path, known: dict[str, Any]) -> None:
        note = self._note(path)
        draft = Path(draft_name(str(note)))
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(known), encoding="utf-8")
            draft.replace(note)


def sha256_of_file(path: str | Path, progress: Callable[[], None] = lambda: None, start: int = 0) -> str:
    """Return the SHA-256 of a file from byte `start` on; `progress` is called per block, and may raise."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            progress()
    return digest.hexdigest()


def _state(path: str | Path) -> list[int]:
    """Return size, times of the last change of content and of inode (ns), and inode."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
