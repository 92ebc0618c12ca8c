"""Completions of a server on disk, written as they arrive and before a step trains on them.

    FOLDER/step_0000012.jsonl    a header, then a line with a hash for each completion

A server does not sample the same text again, so a resumed run reads what it had: all completions of the steps
after its checkpoint, or those of a step that was cut short.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from mkd.errors import DataError
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout

STEP_FILE = re.compile(r"step_(\d{7,})\.jsonl")


@dataclass
class RolloutRecord:
    """The record of a run, on rank 0."""

    folder: Path
    settings: str  # fingerprint of everything that decides the completions; other records are replaced
    oldest_checkpoint: Callable[[], int] = lambda: 0  # steps in it; records of these are removed
    _file: IO[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, iteration: int, requests: Sequence[Request]) -> dict[int, Rollout]:
        """Return place of the request -> completion of what is recorded; further ones are added to it.

        Raises DataError for a damaged record.
        """
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.forget(self.oldest_checkpoint())
        path = self.folder / f"step_{iteration:07d}.jsonl"
        header = {"iteration": iteration, "settings": self.settings}
        found, size = _read(path, header, requests) if path.exists() else ({}, 0)
        self._file = path.open("r+b" if size else "wb")
        self._file.truncate(size)
        self._file.seek(size)
        if not size:
            self._write(header)
        return found

    def add(self, rollout: Rollout, version: int) -> None:
        """Write one completion, sampled with the weights after `version` updates. Called by any thread."""
        with self._lock:
            self._write(
                {
                    "prompt": rollout.request.prompt,
                    "sample": rollout.request.sample,
                    "version": version,
                    "finish": rollout.finish,
                    "prompt_ids": rollout.request.ids.tolist(),
                    "ids": rollout.ids.tolist(),
                    "logp": rollout.logp.tolist(),  # every fp32 number survives as a decimal
                }
            )

    def close(self) -> None:
        """Wait until all lines are on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def forget(self, last: float) -> None:
        """Remove the records of steps up to `last`."""
        for path in self.folder.glob("step_*.jsonl"):
            match = STEP_FILE.fullmatch(path.name)
            if match is not None and int(match.group(1)) <= last:
                path.unlink(missing_ok=True)

    def _write(self, content: dict[str, Any]) -> None:
        assert self._file is not None, "the record of a step is open"
        self._file.write(json.dumps(content | {"sha256": _hash(content)}).encode() + b"\n")
        self._file.flush()


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path, header: dict[str, Any], requests: Sequence[Request]) -> tuple[dict[int, Rollout], int]:
    """Return (place of the request -> completion, bytes of whole lines); 0 bytes: the record is another's."""
    places = {(one.prompt, one.sample): place for place, one in enumerate(requests)}
    found: dict[int, Rollout] = {}
    size = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # the process ended while it wrote
        content = _checked(line, path, number)
        if number == 1:
            if content != header:
                return {}, 0
        else:
            place = places.get((content["prompt"], content["sample"]))
            if place is None or requests[place].ids.tolist() != content["prompt_ids"]:
                return {}, 0
            found[place] = Rollout(
                requests[place],
                np.array(content["ids"], dtype=np.int64),
                np.array(content["logp"], dtype=np.float32),
                -np.array(content["logp"], dtype=np.float32),
                content["finish"],
                lag=header["iteration"] - 1 - content["version"],
            )
        size += len(line)
    return found, size


def _checked(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        content = json.loads(line)
        if content.pop("sha256") == _hash(content):
            return content
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    raise DataError(
        f"{path}:{number} is damaged",
        "it is a completion that the run had sampled, and its hash differs",
        "remove the file: the completions of this step are sampled again",
        code="cached-file-damaged",
    )
