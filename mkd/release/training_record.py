"""The log folder of a run that has ended: settings, figures, forecast, loss card."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.config.load import DEFAULT, SavedSetting, read_saved_config
from mkd.errors import DataError
from mkd.log.records import TRAIN, read_records, split_of
from mkd.operations.run_folders import SAVED_CONFIG
from mkd.version import __version__

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")
COMMAND, PROCESSES, VERSIONS, HUB_IDS = "command", "num_processes", "versions", "hub_ids"
"""Keys of plan.json that say how a run was started. HUB_IDS lists the models that are not folders."""
HUB_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # of a model in the hub's cache
_TEACHER = re.compile(r"teachers\[(\d+)\]\.(hf|load|name)")


def start_of_run(words: Sequence[str], num_processes: int, models: Sequence[str]) -> dict[str, Any]:
    """Return what plan.json says about a start with the flags `words`. `models` are the models' places."""
    hub_ids = sorted(name for name in models if not Path(name).expanduser().exists())
    return {COMMAND: [*words], PROCESSES: num_processes, VERSIONS: versions(), HUB_IDS: hub_ids}


def versions() -> dict[str, str]:
    """Return the versions of mkd, Python and the packages that decide what a run computes."""
    found = {"mkd": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class SourceModel:
    """A model that a run has read."""

    role: str  # "student", or the name of a teacher
    place: str  # folder, hub id or checkpoint, as given
    is_on_hub: bool = False  # `place` is a hub id

    @property
    def hub_id(self) -> str | None:
        """Its name on the hub; None for a folder that is not in the hub's cache."""
        cached = HUB_FOLDER.search(self.place)
        return self.place if self.is_on_hub else "/".join(cached.groups()) if cached else None

    @property
    def shown(self) -> str:
        """Name for a reader who may be on another machine: the hub id, or the last part of the path."""
        return self.hub_id or Path(self.place).name or self.place


@dataclass(frozen=True)
class TrainingRecord:
    """The files of a log folder, up to one iteration. What a folder lacks is empty."""

    settings: Mapping[str, SavedSetting]  # path of a setting (`kd.kd_ratio`) -> value and origin
    records: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    plan: Mapping[str, Any]  # of plan.json
    loss_card: str

    @classmethod
    def read(cls, folder: Path, until: int | None = None) -> TrainingRecord:
        """Return the record of a run up to iteration `until` (default: its last). Never raises."""
        try:
            settings = {one.path: one for one in read_saved_config(folder / SAVED_CONFIG)}
        except (OSError, ValueError):
            settings = {}
        try:
            records = read_records(folder)
        except DataError:
            records = []
        try:
            plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            plan = {}
        try:
            loss_card = (folder / "loss_card.txt").read_text(encoding="utf-8")
        except (OSError, ValueError):
            loss_card = ""
        kept = [one for one in records if until is None or one["iteration"] <= until]
        return cls(settings, kept, plan if isinstance(plan, dict) else {}, loss_card)

    def value(self, path: str, default: Any = None) -> Any:
        """Return a setting; `default` if the folder does not have it."""
        return self.settings[path].value if path in self.settings else default

    @property
    def given(self) -> dict[str, Any]:
        """Settings that somebody chose, by path."""
        return {path: one.value for path, one in self.settings.items() if one.origin != DEFAULT}

    @property
    def student(self) -> SourceModel | None:
        """The model that the run started from."""
        place = self.value("student.hf") or self.value("student.load")
        return self._model("student", str(place)) if place else None

    @property
    def teachers(self) -> list[SourceModel]:
        """The models that it learned from, in order."""
        numbers = sorted({int(match.group(1)) for path in self.settings if (match := _TEACHER.match(path))})
        found = []
        for number in numbers:
            hf, load, name = (self.value(f"teachers[{number}].{key}") for key in ("hf", "load", "name"))
            if hf or load:
                found.append(self._model(str(name or "teacher"), str(hf or load)))
        return found

    def _model(self, role: str, place: str) -> SourceModel:
        return SourceModel(role, place, is_on_hub=place in self.plan.get(HUB_IDS, ()))

    @property
    def last_step(self) -> Mapping[str, Any]:
        """Record of the last log interval of training; {} without one."""
        return next((one for one in reversed(self.records) if split_of(dict(one)) == TRAIN), {})

    def evaluations(self, split: str) -> list[Mapping[str, Any]]:
        """Return the records of a split, first and last: [] without one, one if there is only one."""
        found = [one for one in self.records if split_of(dict(one)) == split]
        return found if len(found) < 2 else [found[0], found[-1]]

    def data_sets(self) -> Iterator[str]:
        """Yield the hub's names of the data sets that the run was trained on."""
        for value in self.value("data.data_path", ()) or ():
            if str(value).startswith("hub:"):
                name = str(value).split(":")[1]
                yield name.split("@")[0]
