"""The settings of the precision of the products in a student's decoder layers."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option


@dataclass(frozen=True)
class StudentPrecisionSettings:
    """The precision of the products in the student's decoder layers, in training alone."""

    precision: str = option(
        "bf16",
        "precision of the products in the student's layers while it is trained. bf16: the run's precision. "
        "fp8: Transformer Engine rounds weights, activations and gradients to FP8 in front of every product. "
        "Parameters, evaluations, samples and exports stay in bf16. fp8 needs --bf16, a GPU with FP8 and a "
        "dense student, and is faster from a hidden size of about 4,096 on",
        choices=("bf16", "fp8"),
    )
    fp8_recipe: str = option(
        "blockwise",
        "scales of --student-precision fp8. blockwise: one for 128 x 128 weights and one for 128 channels of "
        "a token. tensorwise: one for each weight, each activation and each gradient, which is faster and "
        "less exact",
        choices=("blockwise", "tensorwise"),
    )
