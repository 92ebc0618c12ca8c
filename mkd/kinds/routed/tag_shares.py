"""The shares of tags in the packs of a run, and of the micro-batches in which a teacher therefore runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mkd.config.data_files import parse_blend
from mkd.config.schema import Config
from mkd.config.tag_rules import TagRules
from mkd.errors import UsageError

OTHERS = ""
"""Stands for all tags that no teacher names."""


@dataclass(frozen=True)
class TagShares:
    """The expected share of each tag in the packs."""

    rules: TagRules
    shares: Mapping[str, float]  # their sum is 1
    is_known: bool  # False: records have their own tags, which are assumed to be equally frequent

    @classmethod
    def of(cls, config: Config) -> TagShares | None:
        """Return the shares; None if the run has one loss for all records.

        Weights of --data-path are shares of packs. They are those of tags if every file has one tag.
        """
        rules = TagRules.of(config)
        if rules is None:
            return None
        by_files = None if rules.key or config.rollout.is_on else _shares_of_files(config, rules)
        if by_files is not None:
            return cls(rules, by_files, True)
        names = [*rules.named, *[OTHERS] * any(not tags for tags in rules.teachers.values())]
        names = names or [OTHERS]
        return cls(rules, dict.fromkeys(names, 1 / len(names)), False)

    def of_teacher(self, name: str, packs: int = 1, batch: int = 1) -> float:
        """Return the expected share of micro-batches in which a teacher runs.

        `packs` neighbours of the `batch` packs of a step run it together if one of them needs it. Packs of
        one tag are neighbours, in the order of tags. A boundary to the next tag lies anywhere in a group of
        packs, so that both tags have (packs - 1) / (2 packs) groups more on average.
        """
        tags, share = sorted(self.shares), 0.0
        for number, tag in enumerate(tags):
            if name in self.rules.taught_by(tag):
                boundaries = (number > 0) + (number < len(tags) - 1)
                one = self.shares[tag]
                share += min(one + boundaries * (packs - 1) / (2 * batch), one * packs)
        return min(1.0, share)

    @property
    def source(self) -> str:
        """Source of the shares, for texts."""
        return "weights of --data-path" if self.is_known else "assumed: all tags are equally frequent"

    @property
    def has_one_teacher_each(self) -> bool:
        """True if every tag has one teacher."""
        return all(len(self.rules.taught_by(tag)) == 1 for tag in self.shares)


def _shares_of_files(config: Config, rules: TagRules) -> dict[str, float] | None:
    """Return the shares of tags if every file has one tag and a weight; None otherwise."""
    try:
        blend = parse_blend(config.data.data_path)
    except UsageError:  # reported where data are checked
        return None
    weights = blend.weights or ((1.0,) if len(blend.paths) == 1 else None)
    if weights is None or not all(path in rules.files for path in blend.paths):
        return None
    found: dict[str, float] = {}
    for path, weight in zip(blend.paths, weights, strict=True):
        tag = rules.files[path]
        found[tag] = found.get(tag, 0.0) + weight / sum(weights)
    return found
