"""The folder in which a run and the writer of its records meet.

FOLDER/NAME.jsonl       records; a file gets its name when it is complete, and never changes
FOLDER/progress.json    how far the run is, and where its weights are
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRESS_FILE = "progress.json"


@dataclass
class RecordFolder:
    """The files of a folder, each read once in the order of their names."""

    folder: Path
    known: set[str] = field(default_factory=set)  # names of files that were read
    _told: Mapping[str, Any] | None = None

    def new_lines(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield (file, line number, line) of all files that have come since the last call."""
        names = sorted(one.name for one in self.folder.iterdir() if is_records(one.name))
        for name in names:
            if name in self.known:
                continue
            path = self.folder / name
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # the writer has removed it since
                continue
            self.known.add(name)
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield str(path), number, line

    def tell(self, progress: Mapping[str, Any]) -> None:
        """Replace the file for the writer, if it differs."""
        if progress == self._told:
            return
        path = self.folder / PROGRESS_FILE
        draft = path.with_name(f".{PROGRESS_FILE}.partial")
        draft.write_text(json.dumps(progress, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)
        self._told = dict(progress)


def is_records(name: str) -> bool:
    """Return True for the name of a complete file of records."""
    return name.endswith(".jsonl") and not name.startswith((".", "_"))
