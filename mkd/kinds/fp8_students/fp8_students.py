"""Runs whose student multiplies in FP8 while it is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkd.config.models import EMA, StudentConfig
from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError
from mkd.kinds.fp8_limits import BLOCK, Fp8Products
from mkd.kinds.kind import NOTHING, Kind, Row
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.checks.ranges import PACKS, SHARDS
from mkd.plan.facts import RunFacts
from mkd.plan.work import Work

if TYPE_CHECKING:  # it loads torch
    from mkd.resolve.run_plan import Plan

GIVEN = "--student-precision fp8"
ROWS = 16
"""Multiple of the tokens in front of a product: gradients of weights add over tokens, in products as well."""

FAST_HIDDEN_SIZE = 4096
"""Smallest hidden size at which FP8 was measured to be faster."""

PRODUCT_TIME = {"tensorwise": 0.736, "blockwise": 0.81}
"""FP8 recipe -> time of the layers' products, forward and backward, over that in bf16.

From the step of 6 layers of Qwen3-8B's shape with 4 packs of 8,192 tokens and CUDA graphs on one H100
(Transformer Engine 2.11): 0.825 and 0.874 of the step in bf16. Attention, heads and update take as long.
"""

SLOW_PRODUCT_TIME = 1.15
"""The same below `FAST_HIDDEN_SIZE`, as measured with 4 layers of a 1.7B student and both recipes."""

LOSSES = {
    "tensorwise": "a small model ended 0.04 nats above bf16 after 200 steps, mean of 3 seeds (-0.03 to 0.12)",
    "blockwise": "a small model ended 0.04 nats below bf16 after 200 steps, mean of 3 seeds (-0.08 to -0.01)",
}
"""FP8 recipe -> what is known of its held-out loss: docs/fp8-students.md."""


class Fp8Students(Kind):
    """Runs whose student multiplies in FP8. Parameters, evaluations and samples stay in bf16."""

    calculates_with = (*PACKS, *SHARDS)

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        config, student = facts.config, facts.config.student
        if not is_on(student):
            if student.fp8_recipe != type(student)().fp8_recipe:
                given = f"--student-fp8-recipe {student.fp8_recipe}"
                do = f"add {GIVEN}" if config.training.bf16 else f"add {GIVEN} --bf16"
                excluded = any(_others(config)) or any(one.weights == EMA for one in config.teachers)
                yield no_effect(given, "student-precision is bf16", "remove it" if excluded else do)
            return
        if not config.training.bf16:
            why = "everything but the products stays in bf16, and the run is in fp32"
            do = f"add --bf16, or remove {GIVEN}"
            yield UsageError(f"{GIVEN} without --bf16", why, do, code="add-flag")
        yield from _others(config)
        products = Fp8Products("student", GIVEN, student.fp8_recipe, f"remove {GIVEN}")
        yield from products.row_problems(config, config.training.seq_length, "--seq-length", ROWS)
        if facts.student is not None:
            if facts.student.vision is not None:
                what, why = f"{GIVEN}, but the student takes images", "its FP8 products have not been tried"
                yield UsageError(what, why, products.remedy, code="fp8-not-possible")
            yield from products.shape_problems(config, facts.student)

    def device_problems(self, facts: RunFacts) -> Iterable[MkdError]:
        from mkd.platform.fp8_support import fp8_problems

        student = facts.config.student
        return fp8_problems({student.fp8_recipe} if is_on(student) else (), "student")

    def work(self, config: Config) -> Work:
        if not is_on(config.student):
            return Work()
        recipe = config.student.fp8_recipe
        text = f"student's layers multiply in FP8 ({recipe} scales): "
        text += "each micro-batch in flight keeps 2 bytes more a weight"
        return Work(student=StudentPrecision(recipe), lines=(lambda packs: text,))

    def student_rows(self, config: Config) -> Iterator[Row]:
        recipe = config.student.fp8_recipe
        if is_on(config.student):
            gradients = "gradients E4M3" if recipe == "blockwise" else "gradients E5M2"
            products = f"products of its layers in FP8 (E4M3, {gradients}, {recipe} scales) in training"
            yield "student", f"{products}; in bf16 in evaluations, samples and exports"

    def notes(self, plan: Plan) -> Iterator[str]:
        student = plan.student.shape
        if is_on(plan.config.student):
            yield f"note: {GIVEN}, {plan.config.student.fp8_recipe}: {LOSSES[plan.config.student.fp8_recipe]}"
            if student.hidden_size < FAST_HIDDEN_SIZE:
                slower = f"at hidden size 2,048 it took {SLOW_PRODUCT_TIME:g} of the time of bf16"
                yield f"note: {GIVEN} with hidden size {student.hidden_size}: {slower}"

    def identity(self, config: Config) -> Mapping[str, object]:
        return {"student.precision": f"fp8 {config.student.fp8_recipe}"} if is_on(config.student) else NOTHING


@dataclass(frozen=True)
class StudentPrecision:
    """Costs of a student in FP8, as a plan counts them; see `mkd.plan.work.StudentProducts`."""

    recipe: str

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight that a micro-batch keeps: FP8 numbers, and the same transposed for backward."""
        return 2.0

    @property
    def input_bytes(self) -> float:
        """Bytes of an input of a product, in FP8, with fp32 scales of blocks of a token or of channels."""
        return 1.0 + (4 / BLOCK if self.recipe == "blockwise" else 0.0)

    def product_time(self, hidden_size: int) -> float:
        """Return the time of products over the time in bf16."""
        return PRODUCT_TIME[self.recipe] if hidden_size >= FAST_HIDDEN_SIZE else SLOW_PRODUCT_TIME


def is_on(student: StudentConfig) -> bool:
    """Return True if the student multiplies in FP8."""
    return student.precision == "fp8"


def _others(config: Config) -> Iterator[UsageError]:
    """Yield a problem for each way of training that has not been tried in FP8, or contradicts it."""
    judged = "log-probabilities in FP8 would be compared with those in bf16, of the reference or of sampling"
    others = {
        "--lora-rank": (config.lora.is_on, "FP8 products of frozen weights have not been tried in training"),
        "--student-rounding": (
            config.rounding.rounding is not None,
            "the weights would be rounded a second time, and training would not see those of the export",
        ),
        "preference pairs": (config.pair_loss is not None, judged),
        "--reward": (config.grpo.is_on, judged),
    }
    for name, (is_given, why) in others.items():
        if is_given:
            do = f"remove {GIVEN}"
            yield UsageError(f"{GIVEN} with {name}", why, do, code="exclude-each-other")
