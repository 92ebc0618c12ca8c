"""Read everything that the log folder of a run says about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from mkd.config.load import DEFAULT, SavedSetting, read_saved_config
from mkd.errors import DataError, UsageError
from mkd.human import counted
from mkd.log.records import TRAIN, each_record
from mkd.operations.event_log import DONE, EVENTS_FILE, FAILURE, RESUME, START, STOP
from mkd.report.columns import Split, split_columns

METRICS, SAMPLES, CONFIG = "metrics.jsonl", "samples.jsonl", "config.yaml"
TRAIN_ITERS = "training.train_iters"
NAME = "log.name"
ENDS = (DONE, STOP, FAILURE)
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """Something that happened to a run; `time` is UTC to the second, or empty."""

    time: str
    iteration: int | None
    kind: str
    text: str


@dataclass(eq=False)
class RunFolder:
    """A run as its files describe it. What a file does not say is empty."""

    name: str
    path: Path
    splits: Mapping[str, Split] = field(default_factory=dict)
    settings: Sequence[SavedSetting] = ()
    loss_card: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # rank -> first line of its report
    notes: list[str] = field(default_factory=list)  # files that could not be read

    def setting(self, path: str) -> Any:
        """Return the value of a setting, None if the file does not have it."""
        return next((one.value for one in self.settings if one.path == path), None)

    @property
    def title(self) -> str:
        """The --name that was given, else the name."""
        given = (one.value for one in self.settings if one.path == NAME and one.origin != DEFAULT)
        return str(next(given, None) or self.name)

    @property
    def train_iters(self) -> int | None:
        """The iterations that the run was asked for; None if its settings do not say it as a number."""
        asked = self.setting(TRAIN_ITERS)
        return asked if type(asked) is int else None

    @property
    def last_iteration(self) -> int | None:
        """The iteration of the last record; None without records."""
        return max((int(split.iterations[-1]) for split in self.splits.values()), default=None)

    @property
    def state(self) -> str:
        """End of the run (`done`, `failed` ...), as far as its files tell."""
        asked, last = self.train_iters, self.last_iteration
        marks = [event.kind for event in self.events if event.kind in (*ENDS, START, RESUME)]
        is_complete = last is not None and asked is not None and last >= asked
        if marks and marks[-1] == FAILURE:
            return "failed"
        if last is None:
            return "no records yet"
        if is_complete:
            return "done"
        if marks:
            is_over = marks[-1] in (DONE, STOP)
            return "stopped early" if is_over else "in progress or killed"
        return "not complete"


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Read the runs, each given by its log folder or its metrics.jsonl.

    Raises UsageError for a path that is not a run and for a run that is named twice, DataError for a
    metrics.jsonl that is not valid.
    """
    folders = [_folder(path) for path in paths]
    for place, folder in enumerate(folders):
        if folder.resolve() in [earlier.resolve() for earlier in folders[:place]]:
            raise UsageError(
                f"{paths[place]} is named twice",
                "its curves would cover each other",
                "name each run once",
                code="names-equal",
            )
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def require_records(runs: Sequence[RunFolder]) -> None:
    """Raise DataError if no run has a record."""
    if not any(run.splits for run in runs):
        raise DataError(
            f"no records in {', '.join(str(run.path) for run in runs)}",
            "the runs have not logged a step",
            "let them run on",
            code="metrics-empty",
        )


def _folder(path: Path) -> Path:
    folder = path.parent if path.name == METRICS else path
    if not (folder / METRICS).is_file():
        raise UsageError(
            f"{path} is not a run",
            f"it has no {METRICS}",
            "name the log folder of a run (--log-dir, else --save, else runs/NAME), or its metrics.jsonl",
            code="path-not-found",
        )
    return folder


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for size in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-size:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return names


def _read(folder: Path, name: str) -> RunFolder:
    run = RunFolder(name, folder)
    run.splits = split_columns(each_record(folder))
    for split, columns in run.splits.items():
        if columns.num_repeated:
            records = counted(columns.num_repeated, f"{split} record")
            run.notes.append(f"{records} of repeated iterations: the last ones count")
    run.settings = _or_note(run, CONFIG, read_saved_config) or ()
    asked = run.setting(TRAIN_ITERS)
    if asked is not None and run.train_iters is None:
        run.notes.append(f"{CONFIG}: {TRAIN_ITERS} {asked!r} is not a whole number: left out")
    run.loss_card = (_or_note(run, "loss_card.txt", _text) or "").rstrip()
    run.plan = _or_note(run, "plan.json", _mapping) or {}
    run.events = [_event(line) for line in _or_note(run, EVENTS_FILE, _json_lines) or ()]
    run.samples = _or_note(run, SAMPLES, _json_lines) or ()
    run.errors = {
        path.stem.replace("_", " "): _first_error(path) for path in sorted(folder.glob("errors/rank_*.txt"))
    }
    if TRAIN in run.splits and not run.events:
        run.events = _events_in_metrics(run.splits[TRAIN])
    return run


def _or_note(run: RunFolder, name: str, read: Callable[[Path], T]) -> T | None:
    """Return `read(file)`, None without the file. A file that cannot be read becomes a note."""
    path = run.path / name
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError) as error:
        run.notes.append(f"{name} could not be read: {error}")
        return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _mapping(path: Path) -> dict[str, Any]:
    found = json.loads(_text(path))
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, one a line, without lines that are none: a torn line, or a stray one."""
    found = []
    for line in _text(path).splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            found.append(one)
    return found


def _event(line: Mapping[str, Any]) -> Event:
    try:
        moment = datetime.fromtimestamp(float(line["time"]), timezone.utc)
        time = f"{moment:%Y-%m-%d %H:%M:%S}"
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        time = ""
    iteration = line.get("iteration")
    return Event(
        time,
        iteration if isinstance(iteration, int) else None,
        str(line.get("kind", "note")),
        str(line.get("text", "")),
    )


def _events_in_metrics(train: Split) -> list[Event]:
    """Return the events of a run without an event log: counts in its records."""
    kinds = {"skipped_iterations": "skipped step", "loss_spikes": "loss spike"}
    found = [
        Event("", iteration, kind, f"{value:g} since the record before")
        for key, kind in kinds.items()
        for iteration, value in train.points(key)
        if value > 0
    ]
    return sorted(found, key=lambda event: event.iteration or 0)


def _first_error(path: Path) -> str:
    try:
        return str(json.loads(_text(path).splitlines()[0])["what"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return "a report that cannot be read"
