"""The records of a run on rank 0: it reads them, waits for them, and tells the writer how far the run is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkd.data.quarantine import MAX_REPORTED_ERRORS, BadRecord, append, too_many
from mkd.errors import DataError, ServerLost
from mkd.human import counted
from mkd.kinds.sampled.records.agent_record import (
    OtherRun,
    RecordedRollout,
    RecordLimits,
    read_fields,
    read_record,
)
from mkd.kinds.sampled.records.record_folder import RecordFolder
from mkd.kinds.sampled.records.record_queue import STALE, LostLine, RecordQueue
from mkd.kinds.sampled.records.taken_steps import TakenSteps

LOG = logging.getLogger("mkd")
POLL_S = 0.5  # between looks at the folder
LINE_S = 30.0  # between lines about waiting


@dataclass
class RecordInbox:
    """Everything that rank 0 knows about the records."""

    folder: RecordFolder
    queue: RecordQueue
    limits: RecordLimits
    steps: TakenSteps | None  # None: the run saves nothing
    groups: int  # of a step
    timeout_s: float  # without a new record
    max_bad_records: int
    refused_file: Path  # a line for each bad record
    is_stopped: Callable[[], bool] = lambda: False
    _bad: list[BadRecord] = field(default_factory=list)  # the first ones
    _num_bad: int = 0
    _others: set[str] = field(default_factory=set)  # names of other runs in the records
    _lost: set[tuple[str, int]] = field(default_factory=set)  # file and line, known to the steps
    _done: set[str] = field(default_factory=set)  # files that the steps know to be done
    _weights: Path | None = None
    _version: int = 0  # of `_weights`
    _saved: int = 0  # steps in the oldest checkpoint
    _came: float = 0.0  # time of the last new file
    _said: float = 0.0

    def start(self) -> None:
        """Remember what the steps took, of a run that resumes."""
        if self.steps is not None:
            self.queue.seen.update(self.steps.known_ids())
            self.queue.taken = set(self.queue.seen)
            lost = [LostLine(*one) for one in self.steps.lost_lines()]
            self.queue.seen.update(one.id for one in lost if one.id is not None)
            self._lost = {(one.file, one.line) for one in lost}
            self._done = self.steps.read_files()
            self.folder.known |= self._done

    def replay(self, iteration: int) -> list[RecordedRollout] | None:
        """Return the records that the step took before the run was cut off; None: it took none."""
        found = self.steps.read(iteration, self.limits) if self.steps is not None else None
        return None if found is None else [one.rollout(iteration) for one in found]

    def publish(self, version: int, weights: Path) -> None:
        """Tell the writer of new weights, after `version` updates, and start to wait."""
        self._weights, self._version = weights, version
        self._saved = self.steps.oldest_checkpoint() if self.steps is not None else version
        self._came = self._said = time.monotonic()
        self._tell("waiting")

    def poll(self, iteration: int) -> tuple[int, list[RecordedRollout] | None]:
        """Return how many groups are ready, and the rollouts of the step once there are enough.

        Raises ServerLost if nothing came for too long, DataError for too many bad records.
        """
        self._read_new()
        ready = len(self.queue.ready(iteration))
        if ready < self.groups:
            self._wait(iteration, ready)
            return ready, None
        records = self.queue.take(iteration, self.groups)
        assert records is not None, "so many are ready"
        if self.steps is not None:
            done = sorted(self.folder.known - self.queue.pending_files - self._done)
            self.steps.write(iteration, records, done, self.queue.lost)
            self._done |= set(done)
        self.queue.lost.clear()
        self._tell("training", ready - self.groups)
        return ready, [one.rollout(iteration) for one in records]

    def _read_new(self) -> None:
        for file, number, line in self.folder.new_lines():
            self._came = time.monotonic()
            self._add(file, number, line)

    def _add(self, file: str, number: int, line: bytes) -> None:
        if (Path(file).name, number) in self._lost:
            return  # counted before the run was cut off; its group may be taken, and would never be complete
        fields: dict[str, Any] = {}
        try:
            fields = read_fields(line)
            self.queue.add(read_record(fields, self.limits, (file, number)))
        except OtherRun as other:
            self._others.add(str(other))
            self.queue.skip(STALE)
        except DataError as error:
            self._refuse(BadRecord.from_row(file, number, line, error), fields, file, number)

    def _refuse(self, bad: BadRecord, fields: Mapping[str, Any], file: str, number: int) -> None:
        name, group = (fields.get(key) for key in ("id", "group"))
        size = fields.get("group_size", self.limits.group_size)
        self.queue.lose(
            LostLine(Path(file).name, number, str(name) if name is not None else None),
            str(group) if group is not None else None,
            size if type(size) is int else self.limits.group_size,
        )
        append([bad.entry], self.refused_file)
        self._num_bad += 1
        self._bad = [*self._bad, bad][:MAX_REPORTED_ERRORS]
        if self._num_bad > self.max_bad_records:
            raise too_many(self._bad, self._num_bad, self.max_bad_records, stopped=True)

    def _wait(self, iteration: int, ready: int) -> None:
        now = time.monotonic()
        if self.is_stopped():
            what = "the run is stopped while it waits for records"
            raise ServerLost(what, "", "start the same command again", code="rollout-server-lost")
        if now - self._came > self.timeout_s:
            raise ServerLost(
                f"no record has come to {self.folder.folder} for {self.timeout_s:g} s: iteration {iteration} "
                f"has {self._state(ready)}",
                "the writer has ended, or it waits for something",
                "start the writer, then the same command, or raise --rollout-records-timeout-s",
                code="rollout-server-lost",
            )
        if now - self._said > LINE_S:
            self._said = now
            LOG.info(
                "iteration %d waits for records in %s: %s; the last one came %.0f s ago",
                iteration,
                self.folder.folder,
                self._state(ready),
                now - self._came,
            )
        self._tell("waiting", ready)
        time.sleep(POLL_S)

    def _state(self, ready: int) -> str:
        begun = len(self.queue.groups) - ready
        text = f"{ready} of {counted(self.groups, 'group')} complete, {begun} begun"
        skipped = [f"{number:,} {name}" for name, number in sorted(self.queue.counts.items()) if number]
        text += f"; skipped: {', '.join(skipped)}" if skipped else ""
        if self._others:
            others = ", ".join(sorted(self._others)[:3])
            text += f"; records are of the runs {others}, and this one is {self.limits.run}"
        return text

    def _tell(self, state: str, waiting: int = 0) -> None:
        """Tell the writer how far the run is."""
        self.folder.tell(
            {
                "run": self.limits.run,
                "version": f"{self.limits.run}-{self._version}",
                "updates": self._version,
                "weights": str(self._weights),
                "state": state,
                "groups_of_a_step": self.groups,
                "complete_groups": waiting,
                "samples_per_prompt": self.limits.group_size,
                "max_staleness": self.queue.max_staleness,
                "seq_length": self.limits.seq_length,
                "not_needed_before": max(0, self._saved - self.queue.max_staleness - 1),
            }
        )
