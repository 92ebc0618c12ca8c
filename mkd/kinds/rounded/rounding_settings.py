"""The settings of students whose weights are rounded."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import Range, option
from mkd.config.rounding_formats import FORMATS, Rounding


@dataclass(frozen=True)
class RoundingConfig:
    """A student whose weights are rounded to few bits after every update (QAD)."""

    student_rounding: str | None = option(
        None,
        "format that the student's weights are rounded to after every update, from fp32 main weights that "
        "stay exact. Forward, evaluation and rollouts see the rounded weights, and the export stores them in "
        "that format. Embedding, head, norms and routers stay as they are. Needs --bf16 "
        "(default: no rounding)",
        choices=tuple(FORMATS),
    )
    rounding_group: int | None = option(
        None,
        "elements of a row that share a scale, with --student-rounding int4: 128, 64 or 32 (default: the "
        "length of the format, 128 for int4)",
    )
    rounding_exclude: tuple[str, ...] = option(
        (),
        "patterns of modules that keep their precision, by their Hugging Face names, such as "
        "model.layers.0.* or *.down_proj. Matrices that mkd keeps as one are excluded together: q_proj, "
        "k_proj and v_proj; gate_proj and up_proj",
    )
    round_activations: bool = option(
        False,
        "round the inputs of rounded matrices, too: int8 and fp8 for each token, nvfp4 in blocks of 16. "
        "Gradients pass as if the inputs were exact",
    )
    calibration_batches: int = option(
        8,
        "first global batches that only measure the inputs for --round-activations with nvfp4. The inputs "
        "are rounded from the next one on, with the largest value that was seen",
        valid=Range("1 or more", lambda x: x >= 1),
    )

    @property
    def rounding(self) -> Rounding | None:
        """The format and what it is used for; None: nothing is rounded."""
        if self.student_rounding is None:
            return None
        group = (
            FORMATS[self.student_rounding].groups[0] if self.rounding_group is None else self.rounding_group
        )
        return Rounding(self.student_rounding, group, self.rounding_exclude, self.round_activations)
