"""Runs whose student is rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.kinds.kind import NOTHING, Kind, Row
from mkd.kinds.rounded.rounding_checks import rounding_problems, unused_settings
from mkd.plan.checks.ranges import SHARDS
from mkd.plan.facts import RunFacts
from mkd.plan.work import Work


class RoundedStudent(Kind):
    """Runs whose student is rounded after every update, from fp32 main weights that stay exact."""

    calculates_with = SHARDS

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        rounding = facts.config.rounding.rounding
        if rounding is None:
            yield from unused_settings(facts.config)
        else:
            yield from rounding_problems(facts, rounding)

    def work(self, config: Config) -> Work:
        rounding = config.rounding.rounding
        if rounding is None:
            return Work()
        text = f"student's weights in {rounding.describe()}: rounded in place, no more memory"
        if rounding.inputs:
            text += f"; its inputs in {rounding.kind.inputs}"
            batches = config.rounding.calibration_batches
            text += (
                f", after {batches} global batches that measure them" if rounding.kind.is_calibrated else ""
            )
        return Work(lines=(lambda packs: text,))

    def text_rows(self, config: Config) -> Iterator[Row]:
        rounding = config.rounding.rounding
        if rounding is not None:
            kept = f"; kept: {', '.join(rounding.exclude)}" if rounding.exclude else ""
            inputs = f", inputs of matrices in {rounding.kind.inputs}" if rounding.inputs else ""
            text = f"weights in {rounding.describe()}, rounded after every update{inputs}{kept}; "
            yield "student", f"{text}gradients go to fp32 weights that stay exact"

    def identity(self, config: Config) -> Mapping[str, object]:
        rounding = config.rounding.rounding
        if rounding is None:
            return NOTHING
        return {f"student.rounding.{name}": value for name, value in rounding.as_json().items()}
