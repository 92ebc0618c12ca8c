"""Groups of records on their way to a step: complete ones, incomplete ones, and those that are too old."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mkd.errors import DataError
from mkd.kinds.sampled.records.agent_record import ERROR, AgentRecord

STALE, DUPLICATE, LEFT_OUT, BAD = "stale", "duplicate", "left_out", "bad"


class LostLine(NamedTuple):
    """A line whose record cannot be used: bad, too long, or an error."""

    file: str  # its name
    line: int
    id: str | None  # if it has one


@dataclass
class Group:
    """The records of a group that have come so far."""

    size: int
    records: list[AgentRecord] = field(default_factory=list)
    lost: list[LostLine] = field(default_factory=list)  # which the group does not wait for
    files: set[str] = field(default_factory=set)  # that its records are in

    @property
    def is_complete(self) -> bool:
        return len(self.records) + len(self.lost) >= self.size

    @property
    def oldest(self) -> int | None:
        """Updates of the oldest weights that sampled it; None without a usable record."""
        return min((one.versions[0] for one in self.records), default=None)

    @property
    def newest(self) -> int:
        return max(one.versions[-1] for one in self.records)


@dataclass
class RecordQueue:
    """The rule for records. A step takes whole groups, the first that came first.

    | a record | is |
    |---|---|
    | with the id of an earlier one | skipped: duplicate |
    | longer than a pack, or whose finish is "error" | left out of its group |
    | wrong | left out of its group, as a bad record |
    | of a group with a record that is more than `max_staleness` updates old | skipped with its group: stale |
    | of weights that the run does not have yet, because it resumed from before | kept until it has them |
    """

    max_staleness: int
    seq_length: int
    groups: dict[str, Group] = field(default_factory=dict)  # in the order of their first records
    seen: set[str] = field(default_factory=set)  # ids
    taken: set[str] = field(default_factory=set)  # ids of earlier steps, whose files are read again
    lost: list[LostLine] = field(default_factory=list)  # since the last step, of groups that are gone
    counts: Counter[str] = field(default_factory=Counter)  # since the last step

    def add(self, record: AgentRecord) -> None:
        """Add a valid record. Raises DataError if it contradicts its group."""
        group = self.groups.get(record.group)
        if record.id not in self.seen and group is not None and group.size != record.group_size:
            what = f"group_size is {record.group_size}, and {group.size} in another record of {record.group}"
            why, do = "a step waits for so many", "repair the writer"
            raise DataError(what, why, do, code="record-value-not-valid")
        if self._is_known(record.id):
            return
        file, number = Path(record.place[0]).name, record.place[1]
        group = self._of(record.group, record.group_size, file)
        if len(record.ids) > self.seq_length or record.finish == ERROR:
            self.counts[LEFT_OUT] += 1
            group.lost.append(LostLine(file, number, record.id))
            return
        group.records.append(record)

    def lose(self, line: LostLine, group: str | None, size: int) -> None:
        """Count a bad record, which its group does not wait for if it names one."""
        if line.id is not None and self._is_known(line.id):
            return
        self.counts[BAD] += 1
        lost = self.lost if group is None else self._of(group, size, line.file).lost
        lost.append(line)

    def skip(self, reason: str, count: int = 1) -> None:
        """Count records that are not used for another reason."""
        self.counts[reason] += count

    def ready(self, iteration: int) -> list[str]:
        """Return the groups that step `iteration` may take. Drops those that are too old."""
        found = []
        for name, group in list(self.groups.items()):
            if group.oldest is None:
                if group.is_complete:
                    self._pop(name)
            elif iteration - 1 - group.oldest > self.max_staleness:
                self.skip(STALE, len(self._pop(name)))
            elif group.is_complete and group.newest < iteration:
                found.append(name)
        return found

    def take(self, iteration: int, count: int) -> list[AgentRecord] | None:
        """Return the records of the first `count` groups that are complete; None: there are fewer."""
        names = self.ready(iteration)[:count]
        if len(names) < count:
            return None
        return [record for name in names for record in self._pop(name)]

    @property
    def pending_files(self) -> set[str]:
        """Files with records of groups that no step has taken."""
        return {file for group in self.groups.values() for file in group.files}

    def counted(self) -> dict[str, float]:
        """Return the counts since the last call, as metrics."""
        names = {STALE: "stale", DUPLICATE: "duplicate", LEFT_OUT: "left_out", BAD: "bad_records"}
        found = {f"rollout/{name}": float(self.counts[key]) for key, name in names.items()}
        self.counts.clear()
        return found

    def _is_known(self, name: str) -> bool:
        if name in self.seen:
            self.counts[DUPLICATE] += name not in self.taken
            self.taken.discard(name)
            return True
        self.seen.add(name)
        return False

    def _pop(self, name: str) -> list[AgentRecord]:
        """Return the records of a group that is not waited for any more."""
        group = self.groups.pop(name)
        self.lost += group.lost
        return group.records

    def _of(self, name: str, size: int, file: str) -> Group:
        group = self.groups.setdefault(name, Group(size))
        group.files.add(file)
        return group
