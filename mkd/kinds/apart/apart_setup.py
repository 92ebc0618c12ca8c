"""The set-up of a teacher on processes of its own: text, files and loss are those of one that runs here."""

from __future__ import annotations

from mkd.plan.models.model_shape import ModelShape
from mkd.resolve.teacher_setup import TeacherSetup


class ApartSetup(TeacherSetup):
    """A teacher of which the student's processes have only the head."""

    @property
    def head_shape(self) -> ModelShape | None:
        return None if self.source is None else self.source.shape  # None: reported before
