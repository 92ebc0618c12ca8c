"""The settings of models: the student, the teachers, and the extra settings of a cross-tokenizer teacher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from mkd.config.divergence import TeacherDivergence
from mkd.config.field import option
from mkd.kinds.apart.apart_settings import AUTO, ApartSettings
from mkd.kinds.averaged.ema_settings import EMAConfig
from mkd.kinds.context.context_settings import ContextConfig
from mkd.kinds.fp8_students.fp8_settings import StudentPrecisionSettings
from mkd.kinds.placed.placed_settings import PlaceSettings, PrecisionSettings

TEACHER_COMBINATIONS = ("weighted_sum", "average", "select", "route")
FROZEN, LIVE, EMA = "frozen", "live", "ema"
"""Weights of a teacher."""
XTOKEN_LOSSES = ("partition_kl", "prefix_kl", "p_kl", "gold", "h_kl", "uld")

_LAYOUT = (
    "decoder layers of each pipeline stage: 8,8,7,7 or Megatron's form 'Et*8|t*8|t*7|t*7L'. "
    "Set it when layers do not divide evenly or the heads need room. "
    "With interleaving, list all stages in model order (default: --pipeline-layout)"
)


@dataclass(frozen=True)
class StudentModel:
    """The weights of the student."""

    hf: str | None = option(
        None,
        "Hugging Face folder or hub id of the student. With --student-load only its config and tokenizer "
        "files are read",
    )
    load: str | None = option(
        None,
        "folder of Megatron distributed checkpoints with the student's initial weights. "
        "To resume a run of mkd use --load instead (default: the weights of --student-hf)",
    )
    pipeline_layout: str | None = option(None, _LAYOUT)
    train_parts: tuple[str, ...] = option(
        ("text", "projector"),
        "parts of a student with images that learn: text (always), projector, tower. The tower is the vision "
        "encoder, the projector makes its features as wide as the text. Frozen parts are exported unchanged",
    )


@dataclass(frozen=True)
class StudentConfig(StudentPrecisionSettings, StudentModel):
    """The model that learns."""


@dataclass(frozen=True)
class XTokenConfig:
    """Comparison of a cross-tokenizer teacher with the student. Any of these settings turns it on."""

    loss: str = option(
        "partition_kl",
        "loss of an aligned chunk. partition_kl: exact KL over the tokens that both sides can spell, and the "
        "rest. prefix_kl: KL over common tokens; another token counts as the common token that it begins "
        "with. p_kl: KL after projecting the student's probabilities onto the teacher's tokens. gold, h_kl: "
        "divergence on the common tokens, sorted differences on the others. uld: sorted differences only",
        choices=XTOKEN_LOSSES,
    )
    alignment: str = option(
        "byte_offset",
        "way to match the tokens of both models. byte_offset: equal spans of the text's bytes. dp: dynamic "
        "programming over token strings, slow, for comparison with published results",
        choices=("byte_offset", "dp"),
    )
    seq_length: int | None = option(
        None,
        "tokens of the teacher's packs, for the text of --seq-length student tokens. Text that does not fit "
        "has no distillation loss (default: as many as the longest pack of the data needs)",
    )
    projection: str | None = option(
        None,
        "file that relates both vocabularies, written by `mkd projection` "
        "(default: built at the start and cached)",
    )
    top_k: int | None = option(
        None,
        "teacher's most probable common tokens that partition_kl compares one by one. The others count "
        "as one sum (default: all)",
    )
    relaxed_map: bool = option(
        False,
        "count tokens as common that differ only in case, leading space or normalisation, with gold or h_kl",
    )
    reasoning: bool = option(
        True, "distil the reasoning regions of assistant turns too. Without it, only the text after them"
    )


@dataclass(frozen=True)
class TeacherModel(TeacherDivergence):
    """The weights of a teacher, and its part in the loss."""

    name: str | None = option(None, "label of the teacher in logs (default: name of its folder)", flag=False)
    hf: str | None = option(
        None,
        "Hugging Face folder or hub id of the teacher, or student-initial: the model that the student starts "
        "from. With --teacher-load only its config and tokenizer files are read",
    )
    load: str | None = option(
        None,
        "folder of Megatron distributed checkpoints with the teacher's weights "
        "(default: the weights of --teacher-hf)",
    )
    topk: str | None = option(
        None,
        "folder written by `mkd topk`. Trains from the teacher's stored top-k "
        "log-probabilities; no teacher runs. With --teacher-hf or --teacher-load it must be an export of "
        "that same teacher (default: run the teacher)",
    )
    hidden: str | None = option(
        None,
        "folder written by `mkd hidden`. Trains from the teacher's stored hidden states: no teacher runs, "
        "and every divergence and temperature is exact. With --teacher-hf or --teacher-load it must be an "
        "export of that same teacher (default: run the teacher)",
    )
    weight: float = option(
        1.0, "weight of this teacher among several, above 0. Weights are divided by their sum", flag=False
    )
    tags: tuple[str, ...] = option(
        (),
        "tags of the records that this teacher teaches, with --teacher-combination route (default: all tags "
        "that no other teacher names)",
        flag=False,
    )
    pipeline_layout: str | None = option(
        None, _LAYOUT.replace(" (default", ". Independent of the student's (default")
    )
    expert_model_parallel_size: int | None = option(
        None,
        "processes that share the teacher's experts. Independent of the student's "
        "(default: --expert-model-parallel-size)",
    )
    weights: str = option(
        FROZEN,
        "weights of the teacher. frozen: those that it starts with. live: the student's own ones at every "
        "moment, without a gradient; it has a context, and takes no memory. ema: a moving average of the "
        "student's, see ema. Teachers that are live or ema name no model",
        choices=(FROZEN, LIVE, EMA),
        flag=False,
    )
    temperature: float | None = option(
        None, "temperature for this teacher (default: --kd-temperature)", flag=False
    )


@dataclass(frozen=True)
class TeacherConfig(ApartSettings, PrecisionSettings, PlaceSettings, TeacherModel):
    """A frozen model to imitate. These flags set the first teacher."""

    xtoken: XTokenConfig | None = None  # None: it has the student's tokenizer
    context: ContextConfig | None = None  # None: it reads the student's prompt
    ema: EMAConfig | None = None  # with the weights `ema`, never None once the configuration is loaded

    @property
    def stand_in(self) -> str | None:
        """Name of the setting that takes the place of a model in the student's processes.

        None: the teacher runs there.
        """
        return next((name for name in STAND_INS if getattr(self, name)), None)

    @property
    def is_apart(self) -> bool:
        """True if the teacher runs on processes of its own."""
        return self.stand_in == APART

    @property
    def place_is_open(self) -> bool:
        """True if the plan chooses its processes, and with them all of `CHOSEN_WITH_PROCESSES`."""
        return self.processes == AUTO

    @property
    def has_head(self) -> bool:
        """True if the loss reads logits of its head: it runs somewhere, or its hidden states are stored."""
        return self.stand_in in (None, "hidden", APART)

    @property
    def is_given(self) -> bool:
        """True if the settings name a model, or what takes its place."""
        return bool(self.hf or self.load or (self.stand_in and not self.is_apart))

    @property
    def has_own_row(self) -> bool:
        """True if it reads another row of tokens than the student."""
        return self.xtoken is not None or self.context is not None

    @property
    def own_seq_length(self) -> int | None:
        """Tokens of its packs, if it reads another row and the settings say so."""
        own = self.xtoken or self.context
        return own.seq_length if own else None

    def as_model(self) -> TeacherConfig:
        """Return the settings of a teacher that runs, without what takes its place."""
        return replace(self.without_processes(), topk=None, hidden=None)

    def placed(self, **chosen: Any) -> TeacherConfig:
        """Return the settings with these of `CHOSEN_WITH_PROCESSES`, and the defaults of the others."""
        defaults = {one.name: one.default for one in fields(self) if one.name in CHOSEN_WITH_PROCESSES}
        return replace(self, **{**defaults, **chosen})

    def without_processes(self) -> TeacherConfig:
        """Return the settings of a teacher without processes of its own."""
        shared: dict[str, Any] = {one.name: one.default for one in fields(ApartSettings)}
        return replace(self, **shared)


TEACHER_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "topk": "mkd.kinds.stored.stored_teachers:StoredTeachers",
        "hidden": "mkd.kinds.stored.hidden_teachers:HiddenTeachers",
        "xtoken": "mkd.kinds.cross_tokenizer.cross_tokenizers:CrossTokenizers",
        "context": "mkd.kinds.context.contexts:Contexts",
    }
)
"""Setting of a teacher -> the kind that it turns on (`mkd.kinds.kind.Kind`), loaded by `known_kinds`."""

APART = "processes"
CHOSEN_WITH_PROCESSES = (
    *(one.name for section in (ApartSettings, PlaceSettings) for one in fields(section)),
    "pipeline_layout",
    "expert_model_parallel_size",
)
"""Settings of a teacher that `processes: auto` chooses."""
PRECISION = tuple(one.name for one in fields(PrecisionSettings))
"""Settings of a teacher that say in which numbers it computes."""
STAND_INS = ("topk", "hidden", APART)
"""Settings of a teacher that take the place of a model in the student's processes."""


EXPORTED = 0
"""Number of the teacher that `mkd topk` and `mkd hidden` export."""


INITIAL = "student-initial"
"""As --teacher-hf: the model that the student starts from, as it is before any update."""


def with_initial(student: StudentConfig, teachers: Sequence[TeacherConfig]) -> tuple[TeacherConfig, ...]:
    """Return the teachers; one that is the initial student names its model."""
    return tuple(
        replace(one, hf=student.hf, load=student.load) if one.hf == INITIAL else one for one in teachers
    )


def teacher_names(teachers: Sequence[TeacherConfig]) -> tuple[str, ...]:
    """Return a name for each teacher: the configured one, else its folder's name, else `teacher0`.

    If another teacher already has a folder's name, the teacher's number is appended. Configured names never
    change.
    """
    names: list[str] = []
    given = [teacher.name for teacher in teachers if teacher.name]
    for index, teacher in enumerate(teachers):
        source = PurePath(teacher.hf or teacher.load or teacher.topk or teacher.hidden or "").name
        name = teacher.name or re.sub(r"[^\w.-]+", "-", source) or f"teacher{index}"
        is_taken = not teacher.name and name in names + given
        names.append(f"{name}-{index}" if is_taken else name)
    return tuple(names)


def teacher_roles(names: Sequence[str]) -> tuple[str, ...]:
    """Return what messages call teachers of these names: `teacher`, with the name if there are several."""
    return ("teacher",) if len(names) == 1 else tuple(f"teacher {name}" for name in names)


def hf_flag(teacher: int | None) -> str:
    """Return the flag, or the entry of a file, of the student (None) or of the teacher of that number."""
    if teacher:
        return f"teachers[{teacher}].hf"
    return "--student-hf" if teacher is None else "--teacher-hf"
