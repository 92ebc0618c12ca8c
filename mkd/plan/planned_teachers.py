"""The teachers in a plan: shape, name, and the tokens that each reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.models import teacher_roles
from mkd.config.schema import Config
from mkd.plan.expert_parallel import expert_parallel_size
from mkd.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Teacher:
    """A teacher that runs, with its settings."""

    shape: ModelShape
    role: str
    seq_length: int  # tokens of its packs; until the data are known, by default the student's number
    is_cross_tokenizer: bool  # its tokenizer differs from the student's
    residency: str  # place of the decoder layers: device, host or peers
    peers: int = 1  # processes that keep equal parts of every layer
    expert_parallel: int = 1  # processes that share its experts

    @property
    def is_streamed(self) -> bool:
        """True if decoder layers come to the device one after another."""
        return self.residency != "device"


def plan_teachers(config: Config, shapes: Sequence[ModelShape]) -> tuple[Teacher, ...]:
    """Combine `shapes` (none if no teacher runs) with the settings of `config.teachers`, in their order."""
    assert len(shapes) <= len(config.teachers), f"{len(shapes)} shapes of {len(config.teachers)} teachers"
    return tuple(
        Teacher(
            shape=shape,
            role=role,
            seq_length=(teacher.xtoken.seq_length if teacher.xtoken else None) or config.training.seq_length,
            is_cross_tokenizer=teacher.xtoken is not None,
            residency=teacher.residency,
            peers=teacher.peers or 1,
            expert_parallel=expert_parallel_size(config, shape, index),
        )
        for index, (shape, role, teacher) in enumerate(
            zip(shapes, teacher_roles(config.teachers), config.teachers, strict=False)
        )
    )
