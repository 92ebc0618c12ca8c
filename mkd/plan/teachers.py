"""The teachers as a plan sees them: shape, name, and the tokens that each reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from mkd.plan.model_shape import ModelShape


def teacher_names(config: Any) -> tuple[str, ...]:
    """A name for each teacher of an `mkd.config.schema.Config`: its own, else that of its folder, else `teacher0`.

    A folder's name that another teacher has already gets the teacher's number; names that were given are never changed.
    """
    names: list[str] = []
    given = [teacher.name for teacher in config.teachers if teacher.name]
    for index, teacher in enumerate(config.teachers):
        source = PurePath(teacher.hf or teacher.load or teacher.topk or "").name
        name = teacher.name or re.sub(r"[^\w.-]+", "-", source) or f"teacher{index}"
        is_taken = not teacher.name and name in names + given
        names.append(f"{name}-{index}" if is_taken else name)
    return tuple(names)


def teacher_roles(config: Any) -> tuple[str, ...]:
    """What texts call the teachers: `teacher`, with its name where there are several."""
    names = teacher_names(config)
    return ("teacher",) if len(names) == 1 else tuple(f"teacher {name}" for name in names)


@dataclass(frozen=True)
class Teacher:
    """A teacher that runs, under a configuration."""

    shape: ModelShape
    role: str
    seq_length: int  # tokens of its packs
    has_own_tokens: bool  # another tokenizer than the student's
    on_host: bool  # weights wait in host memory


def plan_teachers(config: Any, shapes: Sequence[ModelShape]) -> tuple[Teacher, ...]:
    """`shapes`, of `config.teachers` in their order (none where none runs), with what the configuration says of them.

    A teacher with another tokenizer reads `xtoken.seq_length` tokens a pack, or, before the data are known, as many as the
    student.
    """
    assert len(shapes) <= len(config.teachers), f"{len(shapes)} shapes of {len(config.teachers)} teachers"
    return tuple(
        Teacher(
            shape=shape,
            role=role,
            seq_length=(teacher.xtoken.seq_length if teacher.xtoken else None) or config.training.seq_length,
            has_own_tokens=teacher.xtoken is not None,
            on_host=teacher.residency == "host",
        )
        for shape, role, teacher in zip(shapes, teacher_roles(config), config.teachers, strict=False)
    )
