"""The records that each step took, on disk before it trains on them.

    SAVE/rollouts/run.json               the name of the run
    SAVE/rollouts/step_0000012.jsonl     a header with a hash of the rest, then a line for each record
    SAVE/rollouts/read_files.jsonl       files of which no record is waiting any more, with their step

A resumed run takes the same records again in the steps after its checkpoint, and no record twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mkd.errors import DataError
from mkd.kinds.sampled.records.agent_record import AgentRecord, RecordLimits, read_record
from mkd.kinds.sampled.records.record_queue import LostLine
from mkd.kinds.sampled.server.rollout_record import STEP_FILE


@dataclass
class TakenSteps:
    """The files of a run. Only rank 0 has them."""

    folder: Path
    settings: str  # fingerprint of the run; steps of others are replaced
    max_staleness: int
    oldest_checkpoint: Callable[[], int] = lambda: 0  # steps in it
    run: str = ""  # its name, of records that are taken from now on

    def begin(self, resumes: bool, last: int) -> str:
        """Return the name of the run that resumes after step `last`, or of a new one in an emptied folder.

        Steps after `last` of other settings are removed. Their weights sampled records that may still wait or
        come, with the numbers of weights that the run is about to have: it gets a new name, so that they
        are of another run.
        """
        path = self.folder / "run.json"
        gone: list[Path] = []
        if resumes and path.is_file():
            after = [file for step, file in self._files() if step > last]
            gone = [file for file in after if self._read(file)[0]["settings"] != self.settings]
            if not gone:
                self.run = str(json.loads(path.read_text(encoding="utf-8"))["run"])
                return self.run
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (*(path for _, path in self._files()), self._read_files):
                old.unlink(missing_ok=True)
        self.run = new_run_name()
        _write(path, json.dumps({"run": self.run}).encode() + b"\n")
        for old in gone:  # after the name: a start that is cut off here finds the rest, and names it again
            old.unlink()
        return self.run

    def known_ids(self) -> Iterator[str]:
        """Yield the ids of all records that steps took."""
        for _, path in self._files():
            yield from (str(one["record"]["id"]) for one in map(json.loads, self._read(path)[1]))

    def lost_lines(self) -> Iterator[list[Any]]:
        """Yield file, line and id of the records that were lost in or before these steps."""
        for _, path in self._files():
            yield from self._read(path)[0].get("lost", ())

    def read_files(self) -> set[str]:
        """Return the names of files that need not be read again. Forget those of steps that are gone."""
        steps = max((step for step, _ in self._files()), default=0)
        lines = self._read_files.read_bytes().splitlines(keepends=True) if self._read_files.exists() else []
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= steps]
        if kept != lines:
            _write(self._read_files, b"".join(kept))
        return {name for line in kept for name in json.loads(line)["files"]}

    def read(self, iteration: int, limits: RecordLimits) -> list[AgentRecord] | None:
        """Return the records that the step took before; None: it took none. Raises DataError if damaged."""
        path = self._path(iteration)
        if not path.exists():
            return None
        header, lines = self._read(path)
        limits = replace(limits, run=header.get("run") or limits.run)  # it may have had another name
        found = map(json.loads, lines)
        return [read_record(one["record"], limits, (one["file"], one["line"])) for one in found]

    def write(
        self,
        iteration: int,
        records: Sequence[AgentRecord],
        files: Sequence[str],
        lost: Sequence[LostLine] = (),
    ) -> None:
        """Record what a step takes, which `files` are done, and which lines are `lost`.

        Remove steps that no resumed run needs.
        """
        if files:
            with self._read_files.open("ab") as names:
                names.write(json.dumps({"step": iteration, "files": list(files)}).encode() + b"\n")
                names.flush()
                os.fsync(names.fileno())
        lines = [
            json.dumps({"file": one.place[0], "line": one.place[1], "record": one.raw}) for one in records
        ]
        body = "".join(line + "\n" for line in lines).encode()
        header: dict[str, Any] = {
            "iteration": iteration,
            "run": self.run,
            "settings": self.settings,
            "sha256": _sha256(body),
        }
        header["lost"] = list(lost)
        _write(self._path(iteration), json.dumps(header).encode() + b"\n" + body)
        self.forget()

    def forget(self) -> None:
        """Remove old steps. Copies of the records of those that stay could still be new enough."""
        last = self.oldest_checkpoint() - self.max_staleness - 1
        for step, path in self._files():
            if step <= last:
                path.unlink(missing_ok=True)

    @property
    def _read_files(self) -> Path:
        return self.folder / "read_files.jsonl"

    def _path(self, iteration: int) -> Path:
        return self.folder / f"step_{iteration:07d}.jsonl"

    def _files(self) -> list[tuple[int, Path]]:
        found = ((STEP_FILE.fullmatch(path.name), path) for path in self.folder.glob("step_*.jsonl"))
        return sorted((int(match.group(1)), path) for match, path in found if match is not None)

    def _read(self, path: Path) -> tuple[dict[str, Any], list[bytes]]:
        head, _, body = path.read_bytes().partition(b"\n")
        try:
            header = json.loads(head)
            if header["sha256"] == _sha256(body):
                return header, body.splitlines()
        except (ValueError, KeyError, TypeError):
            pass
        raise DataError(
            f"{path} is damaged",
            "it has the records that a step of the run took, and its hash differs",
            "restore it from a copy, or start again from an earlier checkpoint: --ckpt-step",
            code="cached-file-damaged",
        )


def new_run_name() -> str:
    return uuid.uuid4().hex[:12]


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, also after a crash of the machine."""
    draft = path.with_name(f".{path.name}.partial")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
