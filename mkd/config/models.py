"""The settings of models: the student, the teachers, and what a teacher of another tokenizer needs besides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mkd.config.divergence import TeacherDivergence
from mkd.config.field import option

RESIDENCIES = ("device", "host")

_LAYOUT = (
    "decoder layers of each pipeline stage, when they do not divide evenly or the heads need room: 8,8,7,7, or Megatron's "
    "form 'Et*8|t*8|t*7|t*7L'; with interleaving, all stages in model order"
)


@dataclass(frozen=True)
class StudentConfig:
    """The model that learns."""

    hf: str | None = option(
        None,
        "Hugging Face folder or hub id of the student; with --student-load only its config and "
        "tokenizer files are used",
    )
    load: str | None = option(
        None,
        "folder of Megatron distributed checkpoints with the student's first weights; to "
        "continue a run of mkd use --load instead",
    )
    pipeline_layout: str | None = option(None, _LAYOUT)


@dataclass(frozen=True)
class XTokenConfig:
    """How a teacher with another tokenizer is compared with the student; any of these settings turns it on."""

    loss: str = option(
        "partition_kl",
        "what is compared of each aligned chunk of text: partition_kl (exact, over the tokens that both sides can spell and "
        "the rest), prefix_kl (over common tokens, where another token counts as the common one that it begins with), p_kl "
        "(the student's probabilities projected onto the teacher's tokens), gold or h_kl (divergence on the common tokens, "
        "sorted differences on the others), uld (sorted differences only)",
        choices=("partition_kl", "prefix_kl", "p_kl", "gold", "h_kl", "uld"),
    )
    alignment: str = option(
        "byte_offset",
        "how tokens of both models are matched: byte_offset (equal spans of the text's bytes), or dp (dynamic programming "
        "over token strings, for comparison with published results; slow)",
        choices=("byte_offset", "dp"),
    )
    seq_length: int | None = option(
        None,
        "tokens of the teacher's packs, for the text of --seq-length student tokens; what does not fit has no distillation "
        "loss. Not given: what the longest pack of the data needs",
    )
    projection: str | None = option(
        None,
        "file of the relation between both vocabularies, as tools/build_projection.py writes it; not given: built at the "
        "start and cached",
    )
    top_k: int | None = option(
        None,
        "with partition_kl: compare only the teacher's so many most probable common tokens one by one, the others in sum; "
        "not given: all of them",
    )
    exact_token_match_only: bool = option(
        False, "leave out chunks other than one student token against the same token of the teacher"
    )
    relaxed_map: bool = option(
        False,
        "with gold or h_kl: also count tokens as common that differ in case, leading space or normalisation only",
    )
    reasoning: bool = option(
        True, "distil the reasoning regions of assistant turns too; without it only what follows them"
    )


@dataclass(frozen=True)
class TeacherConfig(TeacherDivergence):
    """A frozen model that is imitated. The flags are those of the first teacher."""

    name: str | None = option(None, "label of the teacher in logs; not given: its folder's name", flag=False)
    hf: str | None = option(
        None,
        "Hugging Face folder or hub id of the teacher; with --teacher-load only its config and "
        "tokenizer files are used",
    )
    load: str | None = option(None, "folder of Megatron distributed checkpoints with the teacher's weights")
    topk: str | None = option(
        None,
        "folder that tools/export_teacher_topk.py has written: train from the teacher's stored top-k log-probabilities, no "
        "teacher runs. With --teacher-hf or --teacher-load they must be of that very teacher",
    )
    weight: float = option(
        1.0, "share of this teacher among several, above 0; weights are divided by their sum", flag=False
    )
    pipeline_layout: str | None = option(None, _LAYOUT + "; independent of the student's")
    temperature: float | None = option(None, "of this teacher; not given: --kd-temperature", flag=False)
    residency: str = option(
        "device",
        "where the teacher's weights stay: device, or host (pinned memory; layers come to the device one after another: "
        "less memory, slower)",
        choices=RESIDENCIES,
    )
    xtoken: XTokenConfig | None = None  # None: it has the student's tokenizer


def teacher_names(teachers: Sequence[TeacherConfig]) -> tuple[str, ...]:
    """A name for each teacher : its own, else that of its folder, else `teacher0`.

    A folder's name that another teacher has already gets the teacher's number; names that were given are never changed.
    """
    names: list[str] = []
    given = [teacher.name for teacher in teachers if teacher.name]
    for index, teacher in enumerate(teachers):
        source = PurePath(teacher.hf or teacher.load or teacher.topk or "").name
        name = teacher.name or re.sub(r"[^\w.-]+", "-", source) or f"teacher{index}"
        is_taken = not teacher.name and name in names + given
        names.append(f"{name}-{index}" if is_taken else name)
    return tuple(names)


def teacher_roles(teachers: Sequence[TeacherConfig]) -> tuple[str, ...]:
    """What texts call the teachers: `teacher`, with its name where there are several."""
    names = teacher_names(teachers)
    return ("teacher",) if len(names) == 1 else tuple(f"teacher {name}" for name in names)
