"""Checks of the folder of a first run: its settings, its student and its checkpoints must fit the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkd.checkpoint.folders import holds_checkpoints
from mkd.checkpoint.hf.hf_assets import INDEX_FILE, SINGLE_FILE
from mkd.checkpoint.hf.hf_folder import is_planned, model_files
from mkd.config.load import load_config
from mkd.config.options import flat_settings
from mkd.errors import UsageError, first_line
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.sizes import StudentSizes
from mkd.recipe.first_request import Request

SAVE, LOAD = "checkpoint.save", "checkpoint.load"


def make_folder(out: Path) -> None:
    """Make the folder of a run. Raises UsageError if that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file has this name" if out.is_file() else first_line(error)
        what, do = f"the folder {out} cannot be made", "choose another --out"
        raise UsageError(what, why, do, code="not-writable") from error


def has_weights(folder: Path) -> bool:
    """Return True if `folder` holds all weights of a model: the file that is moved there last exists."""
    return any((folder / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))


def check_new_file(path: Path) -> None:
    """Raise UsageError if the file of settings exists."""
    if path.exists():
        what, do = f"{path.parent} already has {path.name}", "choose another --out, or give --overwrite"
        raise UsageError(what, "it would be replaced", do, code="already-exists")


def check_no_distillation(state: Path) -> None:
    """Raise UsageError if `mkd distill` has begun in the folder of the file `state`."""
    if state.exists():
        raise UsageError(
            f"{state.parent} holds a distillation: {state.name}",
            "its stages would not fit other settings",
            f"choose another --out, edit its settings, or remove {state}",
            code="choose-another-folder",
        )


def check_no_run(request: Request, exports_too: bool) -> None:
    """Raise UsageError if checkpoints are where the run saves: the run would resume from them.

    With `exports_too`, also if a model is where it exports. A --load that the user gave is meant.
    """
    save = Path(request.given.get(SAVE, (request.out / "run",))[0])
    if LOAD not in request.given and holds_checkpoints(save):
        what, why = f"{save} holds checkpoints", "the new run would resume from them"
        raise UsageError(what, why, f"choose another --out, or remove {save}", code="choose-another-folder")
    is_own = exports_too and not {"checkpoint.export_hf", "checkpoint.overwrite"} & set(request.given)
    export = request.out / "hf"
    if is_own and model_files(export):
        what, why = f"{export} holds a model", "the export of the new run would replace it"
        raise UsageError(what, why, f"choose another --out, or remove {export}", code="choose-another-folder")


def check_no_student(request: Request) -> None:
    """Raise UsageError if a model is where the student is to be cut: the cut would replace it."""
    folder = Path(request.student_folder)
    if request.sizes is not None and is_cut(folder):
        what, why = f"{folder} holds a model", "the student that is cut out of the teacher would replace it"
        raise UsageError(what, why, f"choose another --out, or move {folder}", code="choose-another-folder")


def check_student(request: Request) -> None:
    """Raise UsageError if the student that has been cut in `request.out` has other sizes than requested."""
    folder = Path(request.student_folder)
    if request.sizes is None or not (folder / "config.json").exists() or is_planned(folder):
        return
    sizes, teacher, found = sizes_of(folder), request.teacher_shape, ModelShape.from_hf_dir(folder)
    if (found.family, found.vocab_size) != (teacher.family, teacher.vocab_size):
        what, why = f"{folder} holds a student that is no cut of this teacher", "the run would train that one"
        do = f"choose another --out, or remove {folder}"
        raise UsageError(what, why, do, code="choose-another-folder")
    if sizes not in request.sizes.resolve(teacher):
        what = f"{folder} holds a student of other sizes than {request.student}: {describe(sizes)}"
        do = f"choose another --out, or remove {folder}"
        raise UsageError(what, "the run would train that one", do, code="choose-another-folder")


def is_cut(folder: Path) -> bool:
    """Return True if `folder` holds a complete student."""
    return not is_planned(folder) and has_weights(folder)


def sizes_of(folder: Path) -> StudentSizes | None:
    """Return the sizes in a folder's config.json; None if its layers are not equally wide."""
    shape = ModelShape.from_hf_dir(folder)
    widths = {layer.ffn_hidden_size for layer in shape.layers if layer.has_mlp}
    return StudentSizes.of(shape) if len(widths) == 1 else None


def describe(sizes: StudentSizes | None) -> str:
    """Return sizes as a phrase."""
    if sizes is None:
        return "its layers are not equally wide"
    parts = {"layers": sizes.num_layers, "ffn": sizes.ffn_hidden_size}
    parts |= {"groups": sizes.num_query_groups, "hidden": sizes.hidden_size}
    return ", ".join(f"{name} {size}" for name, size in parts.items())


def check_settings(request: Request, path: Path) -> None:
    """Raise UsageError if the settings in `path`, which `mkd init` wrote, do not fit the request.

    Models, text and given flags must be equal. Everything else may have been edited.
    """
    differing = list(_differences(request, path))
    if differing:
        raise UsageError(
            f"{path} has other settings than this command: there {'; '.join(differing)}",
            "it is not replaced, because it may have been edited",
            f"choose another --out, remove {path}, or give what it has",
            code="choose-another-folder",
        )


def _differences(request: Request, path: Path) -> Iterator[str]:
    there = flat_settings(load_config(["--config", str(path)]).config)
    asked: dict[str, Any] = {"student.hf": request.student_folder, "teachers[0].hf": request.teacher}
    asked |= {"data.data_path": request.data, SAVE: str(request.out / "run")}
    asked |= {name: value for name, (value, _) in request.given.items()}
    for name, value in asked.items():
        if json.dumps(there.get(name), default=str) != json.dumps(value, default=str):
            yield f"{name} is {json.dumps(there.get(name), default=str)}"
    folder = Path(request.student_folder)
    if request.sizes is not None and (folder / "config.json").exists():
        sizes = sizes_of(folder)
        if sizes not in request.sizes.resolve(request.teacher_shape):
            yield f"the student has {describe(sizes)}"
