"""The versions of Python and of other packages that mkd is tested with, and how an installed one compares.

Only the standard library is imported here. setup.py names the same ranges, and constraints.txt one version
from each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Versions from `least` to just before `below`."""

    least: tuple[int, ...]
    below: tuple[int, ...]

    def holds(self, version: str) -> bool:
        """Return True if the range holds `version`, of which pre-releases count as the release."""
        return self.least <= numbers(version) < self.below

    def is_newer_than(self, version: str) -> bool:
        """Return True if `version` is older than the range."""
        return numbers(version) < self.least

    def __str__(self) -> str:
        return f">={_dotted(self.least)},<{_dotted(self.below)}"


TESTED = {
    "Python": Range((3, 10), (3, 14)),
    "megatron-core": Range((0, 16, 1), (0, 20)),
    "torch": Range((2, 9), (2, 14)),  # 2.9: since then torchrun forwards SIGUSR1
    "transformers": Range((5, 0), (6, 0)),
    "numpy": Range((1, 26), (3, 0)),
}
TRANSFORMER_ENGINE = {  # first digits of megatron-core -> versions of Transformer Engine
    "0.16": Range((2, 9), (2, 12)),
    "0.19": Range((2, 11), (2, 12)),
}
FUSED_MIXERS = Range((0, 6), (0, 7))
"""Versions of fla-core, whose kernels run gated delta nets on GPUs."""
FP8_TRANSFORMER_ENGINE = "2.9"
"""First version of Transformer Engine with `transformer_engine.pytorch.autocast`, which FP8 products need."""


def transformer_engine_range(megatron_core: str) -> Range | None:
    """Return the versions of Transformer Engine tested with this megatron-core; None if none is."""
    return TRANSFORMER_ENGINE.get(_dotted(numbers(megatron_core)[:2]))


def is_too_old_for_fp8(transformer_engine: str | None) -> bool:
    """Return True for a version of Transformer Engine without what FP8 products need; False if it is None."""
    return transformer_engine is not None and numbers(transformer_engine) < numbers(FP8_TRANSFORMER_ENGINE)


def numbers(version: str) -> tuple[int, int, int]:
    """Return (2, 11, 0) for `2.11.0+cu130`, and (2, 9, 0) for `2.9.0a0`."""
    first, second, third = (re.findall(r"\d+", re.split(r"[a-z+]", version)[0]) + ["0"] * 3)[:3]
    return int(first), int(second), int(third)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
