"""The folder beside the output: what the job is, what is finished, and at the end its summary.

    FILE.jsonl.generated/settings.json        settings that decide the completions
                         completions_N.lines  finished completions, until the output exists
                         summary.json         counts, once the output exists

The output appears whole: it is written here first, and then moved.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mkd.errors import CheckpointError, DataError, UsageError
from mkd.generate.journal import cut_torn_lines, journals

SUFFIX = ".generated"
SETTINGS, SUMMARY, OUTPUT, LOCK = "settings.json", "summary.json", "output.part", ".lock"
WHOLE, SELECTION, DATE = "completions", "selection", "chat_date"


def known_date(out: Path) -> str | None:
    """Return the date that the prompts of an earlier start have, if their template writes dates."""
    found = WorkFolder(out, {}, {}).read(SETTINGS)
    return None if found is None else found.get(DATE)


@dataclass
class WorkFolder:
    """The folder of one output."""

    out: Path
    settings: Mapping[str, Any]  # decide the completions
    selection: Mapping[str, Any]  # choose among them, and may change until the output exists
    date: str | None = None  # of the chat template
    _lock: TextIO | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.out.with_name(self.out.name + SUFFIX)

    def require_ours(self, overwrite: bool) -> None:
        """Raise UsageError if output or folder are those of another job, unless they may be replaced."""
        found = self._begun()
        if found is None:
            if self.out.exists() and not overwrite:
                raise self._taken(f"--out {self.out} exists")
        elif not overwrite and (changed := self._changed(found)):
            raise self._taken(f"{self.path} is of a job with other settings: there {changed}")

    def open(self, overwrite: bool) -> dict[str, Any] | None:
        """Lock the folder. Return the summary if the output is complete, else prepare for completions.

        Raises what `require_ours` does, and CheckpointError if another process writes here.
        """
        self.require_ours(overwrite)
        try:
            self.path.mkdir(exist_ok=True)
            self._take_lock()
            found = self._begun()
            if found is not None and self._changed(found):
                self._clear()
                found = None
            summary = self.read(SUMMARY)
            if found is not None and summary is not None and self.out.is_file():
                return summary
            if found is None or summary is not None:  # a new job, or its output is gone
                self._clear()
            content = {WHOLE: dict(self.settings), SELECTION: dict(self.selection), DATE: self.date}
            self._write(SETTINGS, content)
            cut_torn_lines(self.path)
        except OSError as error:
            what = f"cannot write {self.path}: {error}"
            raise UsageError(what, "", "choose another --out", code="not-writable") from error
        return None

    @property
    def output(self) -> Path:
        """The file that becomes the output."""
        return self.path / OUTPUT

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Move the output to its place, and remove the journals."""
        os.replace(self.output, self.out)
        self._write(SUMMARY, summary)
        for path in journals(self.path):
            path.unlink()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _begun(self) -> dict[str, Any] | None:
        """Return the settings of the job that the folder is of; None if nothing is finished there."""
        has_work = (self.path / SUMMARY).exists() or any(one.stat().st_size for one in journals(self.path))
        return self.read(SETTINGS) if has_work else None

    def _take_lock(self) -> None:
        file = (self.path / LOCK).open("w", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            what = f"another `mkd generate` writes {self.out}"
            do = "wait for it, or choose another --out"
            raise CheckpointError(what, "both would write there", do, code="save-in-use") from error
        self._lock = file

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _changed(self, found: Mapping[str, Any]) -> str:
        """Return how settings differ from those of the folder, "" if they do not."""
        parts = [(WHOLE, self.settings)]
        if (self.path / SUMMARY).exists():  # the completions that were not chosen are gone
            parts.append((SELECTION, self.selection))
        changed = []
        for part, mine in parts:
            theirs = found.get(part, {})
            for name in sorted({*mine, *theirs}):
                if json.dumps(theirs.get(name)) != json.dumps(mine.get(name)):
                    changed.append(
                        f"{name} is {json.dumps(theirs.get(name))}, not {json.dumps(mine.get(name))}"
                    )
        return "; ".join(changed)

    def _taken(self, what: str) -> UsageError:
        do = "choose another --out, or give --overwrite"
        error = UsageError(what, "it would be replaced", do, code="already-exists")
        error.on_all_ranks = True
        return error

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file of the folder, None without it. Raises DataError for damage."""
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            what, why = f"{path} cannot be read", "it says which job the folder is of"
            raise DataError(what, why, f"remove {self.path}", code="cached-file-damaged")
        return found

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a file at once: a kill leaves the old one or the new one."""
        new = self.path / f"{name}.part"
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path / name)
