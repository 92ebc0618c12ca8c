"""A request for a student, and its problems that are found before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.checkpoint.hf.hf_hub import config_folder
from mkd.data.files.named_files import require_files
from mkd.errors import UsageError
from mkd.families.registry import FAMILIES
from mkd.families.vision import saved_text
from mkd.operations.disk import Written, require_disk
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import weight_bytes
from mkd.pruning.sizes import WIDTH_FLAGS, Sizes, StudentSizes


@dataclass(frozen=True)
class StudentRequest:
    """Everything that `make_student` is asked for."""

    teacher: str  # Hugging Face folder or hub id
    out: Path
    sizes: Sizes
    method: str = "block"  # how layers are chosen: block, one-by-one or even
    text: tuple[str, ...] = ()  # files of records; (): nothing is measured
    num_tokens: int = 8192
    seq_length: int = 256
    overwrite: bool = False  # the model in `out` may be replaced


def check_request(request: StudentRequest) -> ModelShape:
    """Return the teacher's shape; for a hub id, only its config.json is downloaded.

    Raises UsageError for sizes that the teacher does not have or that need text, for a teacher that mkd
    cannot cut, and for a folder or a disk that cannot take the student. Raises CheckpointError without a
    teacher, and DataError without the text.
    """
    require_room(request)
    teacher = ModelShape.from_hf_dir(config_folder(request.teacher))
    refuse_other_kinds(teacher)
    alternatives = request.sizes.resolve(teacher)
    problems = [text_problem(request, sizes, teacher) for sizes in alternatives]
    if problems[0] is not None and None not in problems:
        raise problems[0]
    for path in request.text:
        require_files(path, "--data-path")
    num_bytes = min(weight_bytes(sizes.shape(teacher), bf16=True) for sizes in alternatives)
    require_disk(Written("the student", "--out", request.out, num_bytes))
    return teacher


def require_room(request: StudentRequest) -> None:
    """Raise UsageError if the student would replace a model."""
    out, teacher = request.out, Path(request.teacher)
    if out.exists() and teacher.exists() and out.samefile(teacher):
        raise UsageError(
            f"--out {out} is the teacher's folder",
            "the student would overwrite it",
            "choose another folder",
            code="choose-another-folder",
        )
    in_the_way = None if request.overwrite else model_in_the_way("--out", out)
    if in_the_way is not None:
        raise in_the_way


def refuse_other_kinds(teacher: ModelShape) -> None:
    """Raise UsageError for a model with images, with unlike layers or with experts."""
    if not all(layer.is_transformer_layer for layer in teacher.layers):
        raise UsageError(
            f"mkd cannot cut a {teacher.family} model",
            "its layers differ in kind: not all have attention and an MLP",
            "use a smaller model of its family as the student",
            code="cut-not-supported",
        )
    if "text_config" in teacher.hf_config:
        raise UsageError(
            f"mkd cannot cut a {teacher.hf_config.get('model_type')} model",
            "its config.json describes a vision tower too, and a cut knows only the text model",
            _text_to_cut(teacher),
            code="cut-not-supported",
        )
    if teacher.moe is not None:
        raise UsageError(
            f"mkd cannot cut a {teacher.family} model with experts",
            "which layers have experts is counted by position, and a cut would move them",
            "cut a dense model",
            code="cut-not-supported",
        )
    if teacher.vision is not None:
        raise UsageError(
            f"mkd cannot cut a {teacher.vision.family} model",
            "its vision tower makes features as wide as the text model, and a cut knows only the text model",
            _text_to_cut(teacher),
            code="cut-not-supported",
        )


def _text_to_cut(teacher: ModelShape) -> str:
    """Return what can be cut in place of a model with images."""
    nested = teacher.hf_config.get("text_config") or {}
    own = nested.get("model_type")
    if own in FAMILIES:
        return f"cut {saved_text(own)}"
    return f"cut a model of text alone, such as one of {teacher.family}"


def narrower(sizes: StudentSizes, teacher: ModelShape) -> list[str]:
    """Return the names of the sizes other than the number of layers that are below the teacher's."""
    own = StudentSizes.of(teacher)
    return [name for name in WIDTH_FLAGS if getattr(sizes, name) < getattr(own, name)]


def text_problem(request: StudentRequest, sizes: StudentSizes, teacher: ModelShape) -> UsageError | None:
    """Return an error if a cut to `sizes` needs a text to measure on; None if it needs none or has one."""
    if request.text:
        return None
    names = narrower(sizes, teacher)
    given = [WIDTH_FLAGS[name] for name in names if getattr(request.sizes, name) is not None]
    if not names and request.method != "one-by-one":
        return None
    subject = ", ".join(given or ["--target-params, which cuts FFN channels here,"])
    return UsageError(
        f"{subject if names else '--method one-by-one'} needs text",
        "the parts to keep are chosen by what the teacher computes on it",
        "give --data-path FILE",
        code="add-flag",
    )
