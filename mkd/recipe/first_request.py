"""Models, text and machine of a first run, as a user gives them: a student may be only a size."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mkd.checkpoint.hf.hf_hub import config_folder
from mkd.config.data_files import is_raw, parse_blend
from mkd.data.files.named_files import require_files
from mkd.data.first_records import kinds_of_records
from mkd.errors import ErrorList, MkdError, UsageError, collect_error
from mkd.plan.advice.notes import SMALL_TEACHER
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.cut import first_parts
from mkd.pruning.request import StudentRequest, refuse_other_kinds, text_problem
from mkd.pruning.sizes import Sizes, num_parameters

NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMbB])")
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
PARTS = {
    "layers": "num_layers",
    "ffn": "ffn_hidden_size",
    "groups": "num_query_groups",
    "hidden": "hidden_size",
}


def parse_size(text: str) -> Sizes | None:
    """Return the size of a student to cut: `0.5B`, `113M`, `layers:12` or `layers:12,ffn:1024`.

    None: `text` names a model. A folder of that name wins. Raises UsageError for parts that are no size.
    """
    if Path(text).is_dir():
        return None
    if match := NUMBER.fullmatch(text):
        return Sizes(target_params=int(float(match[1]) * UNITS[match[2].lower()]))
    pairs = [part.partition(":") for part in text.split(",")]
    names = [name for name, _, _ in pairs]
    is_valid = all(name in PARTS and number.isdecimal() and int(number) for name, _, number in pairs)
    if ":" in text and names[0] in PARTS and not (is_valid and len(set(names)) == len(names)):
        what, why = (
            f"{text!r} is not a size",
            f"a size has each of {', '.join(PARTS)} once, with a number above 0",
        )
        raise UsageError(what, why, "use for example layers:12,ffn:1024, or 0.5B", code="value-unknown")
    if not is_valid:
        return None
    return Sizes(**{PARTS[name]: int(number) for name, _, number in pairs})


@dataclass(frozen=True)
class Request:
    """Models, text and machine of a first run."""

    teacher: str  # Hugging Face folder or hub id
    student: str  # the same, or a size
    data: tuple[str, ...]  # as --data-path: paths, or weights and paths
    out: Path  # folder of everything that is written
    gpus: int = 0  # processes, one per GPU; 0: one process on the CPU
    gpu_gib: float | None = None  # memory of one GPU
    given: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # settings by path, with their flags

    @property
    def sizes(self) -> Sizes | None:
        """Sizes of a student that is to be cut out of the teacher; None: the student is a model."""
        return parse_size(self.student)

    @property
    def student_folder(self) -> str:
        """Folder or hub id of the student, which may still have to be made."""
        return self.student if self.sizes is None else str(self.out / "student")

    @property
    def text_files(self) -> tuple[str, ...]:
        """Paths in `data`, without weights. Raises UsageError if it has wrong weights."""
        return parse_blend(self.data, "DATA").paths

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return max(1, self.gpus)

    @cached_property
    def teacher_shape(self) -> ModelShape:
        """Shape of the teacher. Raises CheckpointError if there is no such model."""
        return ModelShape.from_hf_dir(config_folder(self.teacher))

    @cached_property
    def student_shape(self) -> ModelShape:
        """Shape of the student; of one that is to be cut, before anything is measured."""
        if self.sizes is None:
            return ModelShape.from_hf_dir(config_folder(self.student))
        refuse_other_kinds(self.teacher_shape)
        return first_parts(self.sizes.resolve(self.teacher_shape)[0], self.teacher_shape).shape(
            self.teacher_shape
        )

    @property
    def is_cut(self) -> bool:
        """True if the student is a cut of the teacher: one to be made, or one with fewer of its layers."""
        teacher, student = self.teacher_shape, self.student_shape
        same = ("family", "hidden_size", "vocab_size", "num_query_groups")
        is_like_it = all(getattr(teacher, name) == getattr(student, name) for name in same)
        return self.sizes is not None or (is_like_it and student.num_layers < teacher.num_layers)

    def student_request(self, num_tokens: int) -> StudentRequest:
        """Return the request for the student that is to be cut, measured on `num_tokens` tokens."""
        assert self.sizes is not None
        return StudentRequest(
            self.teacher, Path(self.student_folder), self.sizes, text=self.text_files, num_tokens=num_tokens
        )

    def check(self) -> None:
        """Raise ErrorList for models, sizes and files that cannot be, all at once."""
        problems: list[MkdError] = []
        paths = collect_error(problems, lambda: self.text_files) or ()
        if collect_error(problems, lambda: self.teacher_shape) is not None:
            collect_error(problems, lambda: self.student_shape)
            if self.sizes is not None and not problems:
                sizes = self.sizes.resolve(self.teacher_shape)[0]
                problems += filter(None, [text_problem(self.student_request(1), sizes, self.teacher_shape)])
        elif self.sizes is None:
            collect_error(problems, lambda: config_folder(self.student))
        may_be_bad = int(self.given.get("data.max_bad_records", (0, ""))[0])
        for path in paths:
            if is_raw(path):  # its first records are read
                collect_error(problems, partial(kinds_of_records, "data", path, may_be_bad))
            elif not Path(path + ".idx").exists():
                collect_error(problems, partial(require_files, path, "data"))
        if problems:
            raise ErrorList(problems)
        if SMALL_TEACHER * num_parameters(self.student_shape) > num_parameters(self.teacher_shape):
            raise UsageError(
                "the student is much larger than the teacher",
                "the two seem to be swapped",
                "give the teacher first; `mkd train` takes any pair",
                code="numbers-contradict",
            )


def tokenizer_ids(model: str) -> dict[str, int] | None:
    """Return string -> id of a model's tokenizer.json; None without one on this machine."""
    path = config_folder(model) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: [string, score] in the order of the ids
            vocabulary = {one[0]: index for index, one in enumerate(vocabulary)}
        return vocabulary | {one["content"]: one["id"] for one in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the checks before the run explain it


def have_other_tokens(first: str, second: str) -> bool | None:
    """Return True if two models use an id for different strings; None if that is not known."""
    ids = tokenizer_ids(first), tokenizer_ids(second)
    if ids[0] is None or ids[1] is None:
        return None
    strings = {index: string for string, index in ids[0].items()}
    return any(strings.get(index, string) != string for string, index in ids[1].items())


def visible_gpus_and_memory() -> tuple[int, float | None]:
    """Return (GPUs that this process may use, GiB of the smallest), by nvidia-smi; (0, None) without it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi")
    if program is None or (visible is not None and visible.strip() in ("", "-1")):
        return 0, None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        mebibytes = [float(line) for line in told.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0, None
    number = min(len(mebibytes), len(visible.split(","))) if visible else len(mebibytes)
    return (number, round(min(mebibytes) / 1024, 1)) if mebibytes else (0, None)


def default_folder(teacher: str, student: str) -> Path:
    """Return runs/STUDENT-from-TEACHER."""
    names = (re.sub(r"[^\w.-]+", "-", Path(one).name) for one in (student, teacher))
    return Path("runs") / "-from-".join(names)
