"""The stages of `mkd distill`: each is a command of mkd, and what is done is kept in OUT/distill.json."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.config.load import load_config
from mkd.config.schema import Config
from mkd.errors import CheckpointError, UsageError
from mkd.plan.models.parameters import model_parameters
from mkd.recipe.first_request import Request
from mkd.recipe.first_run import CONFIG, make_student_words
from mkd.recipe.folder_in_use import has_weights, make_folder
from mkd.run_command import quoted

STATE = "distill.json"
MOST_COMPARED = 2_000_000_000  # parameters of a student that is compared with transformers, in one process


@dataclass(frozen=True)
class Stage:
    """A command, and what it is for."""

    name: str
    title: str
    words: tuple[str, ...]  # the command line without `mkd`
    reads: bytes = b""  # contents of the file of settings that it reads
    leaves: str = ""  # the file, or the folder of a model, without which it has to run again
    may_fail: bool = False  # the stages after it run all the same
    skipped: str = ""  # why it does not run

    @property
    def key(self) -> str:
        """Fingerprint of what it does: if that changes, it has to run again."""
        return hashlib.sha256(json.dumps(self.words).encode() + self.reads).hexdigest()[:16]


@dataclass
class State:
    """Arguments of the first start, and the stages that are done."""

    path: Path
    asked: dict[str, Any]  # as JSON
    stages: dict[str, dict[str, Any]]  # those that are done: seconds of the last start, and the key

    @classmethod
    def read(cls, out: Path) -> State | None:
        """Return the state of a folder; None if no distillation has begun there. Raises CheckpointError."""
        path = out / STATE
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, dict(content["asked"]), dict(content["stages"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what, do = f"{path} cannot be read: {error}", f"remove {out}, or choose another --out"
            raise CheckpointError(
                what, "it says which stages are done", do, code="inputs-unreadable"
            ) from error

    def write(self) -> None:
        """Write the file at once, so that a kill leaves the former one."""
        draft = self.path.with_name(STATE + ".new")
        content = {"asked": self.asked, "stages": self.stages}
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)

    def done(self, stage: Stage, started: float) -> None:
        """Note that a stage is done that has started at this time of the monotonic clock."""
        seconds = round(time.monotonic() - started, 1)
        self.stages[stage.name] = {"seconds": seconds, "key": stage.key}
        self.write()

    def is_done(self, stage: Stage) -> bool:
        """Return True if the stage is done as it is now, and what it leaves is still there."""
        left = Path(stage.leaves)
        is_there = not stage.leaves or (has_weights(left) if left.is_dir() else left.exists())
        return is_there and self.stages.get(stage.name, {}).get("key") == stage.key

    def require_same(self, asked: dict[str, Any]) -> None:
        """Raise UsageError if something else is asked for than when the distillation began."""
        out, changed = self.path.parent, [name for name in asked if asked[name] != self.asked.get(name)]
        if "folder" in changed:
            raise UsageError(
                f"{out} holds a distillation that was started in another directory",
                "the paths of its models and text are relative to that directory",
                f"start it in that directory: cd {quoted(str(self.asked.get('folder')))}",
                code="choose-another-folder",
            )
        if changed:
            was = ", ".join(f"{name} {_shown(self.asked.get(name))}" for name in changed)
            raise UsageError(
                f"{out} holds a distillation with other arguments: there {was}",
                "its stages would not fit together",
                f"choose another --out, or continue that one: `mkd distill --out {out}` reads {out / CONFIG}",
                code="choose-another-folder",
            )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Lock the folder against a second `mkd distill`. Raises CheckpointError if there is one."""
    make_folder(out)
    with open(out / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what, do = f"another `mkd distill` runs in {out}", "wait for it, or choose another --out"
            raise CheckpointError(what, "both would write there", do, code="save-in-use") from error
        yield


def stages_of(request: Request) -> list[Stage]:
    """Return the stages after the settings, in order, from the file as it is now: it may have been edited."""
    path = request.out / CONFIG
    config, reads = load_config(["--config", str(path)]).config, path.read_bytes()
    stages = []
    if request.sizes is not None:
        check = ("data", "check", "--config", str(path), "--student-hf", request.teacher)
        stages.append(Stage("data", "read the text, before anything is computed", check, reads))
        words, title = (*make_student_words(request), "--overwrite"), "cut the student out of the teacher"
        stages.append(Stage("student", title, words, leaves=request.student_folder))
    ranks = ("--nproc-per-node", str(request.processes))
    train = ("train", *ranks, "--config", str(path))
    export, save = config.checkpoint.export_hf, config.checkpoint.save
    title = "train, evaluate held-out text, export"
    stages.append(Stage("train", title, train, reads, leaves=str(export or save or "")))
    stages += _evaluations(request, config, ranks, reads)
    if export and save and model_parameters(request.student_shape).total <= MOST_COMPARED:
        compared = ("parity", "--hf", export, "--load", save)
        title = "compare the export in transformers with the checkpoint in mkd"
        stages.append(Stage("check", title, compared, reads))
    if save:
        title, leaves = "write one page about the run", str(Path(save) / "report.html")
        stages.append(Stage("report", title, ("report", save), reads, leaves=leaves))
    return stages


def _evaluations(request: Request, config: Config, ranks: Sequence[str], reads: bytes) -> Iterator[Stage]:
    """Yield the evaluations of the teacher and the student on held-out tasks, if there are any."""
    if not (config.data.eval_multiple_choice or config.data.eval_completions):
        return
    models = {"teacher": request.teacher, "student": config.checkpoint.export_hf}
    for role, model in models.items():
        if model:
            words = ["evaluate", *ranks, "--config", str(request.out / CONFIG), "--student-hf", model]
            words += ["--out", str(request.out / f"tasks-{role}.json"), "--overwrite"]
            title = f"score the {role} on the held-out tasks"
            is_teacher = role == "teacher"
            skipped = _why_no_teacher_scores(config) if is_teacher else ""
            yield Stage(f"evaluate-{role}", title, tuple(words), reads, may_fail=is_teacher, skipped=skipped)


def _why_no_teacher_scores(config: Config) -> str:
    """Return why the teacher cannot be scored as if it were a student, whole on each GPU; "" if it can."""
    residency = config.teachers[0].residency if config.teachers else "device"
    return "" if residency == "device" else f"its residency is {residency}, and this needs it whole on a GPU"
