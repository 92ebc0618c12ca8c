"""Which teachers teach the records of which tag, as the configuration says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mkd.config.models import teacher_names
from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.kinds.routed.route_settings import ROUTE


@dataclass(frozen=True)
class TaughtTags:
    """The tags whose records one teacher teaches."""

    own: tuple[str, ...]  # (): all but `others`
    others: tuple[str, ...] = ()  # that other teachers name

    def __contains__(self, tag: str) -> bool:
        return tag in self.own if self.own else tag not in self.others


@dataclass(frozen=True)
class TagRules:
    """The tags of teachers and of files."""

    teachers: Mapping[str, tuple[str, ...]]  # name -> tags; (): all that no other teacher names
    files: Mapping[str, str]  # path of data -> tag of its records that have none
    weights: Mapping[str, float]  # tag -> weight; {}: one mean over all tokens
    of_prompts: tuple[str, ...] = ()  # tags of the prompts that the student completes
    key: str | None = None  # of a record's tag; None: only files have tags

    @classmethod
    def of(cls, config: Config, of_prompts: Iterable[str] = ()) -> TagRules | None:
        """Return the rules; None if the run has one loss for all records."""
        if not (config.kd.teacher_combination == ROUTE and config.kd.kd_ratio):
            return None
        names = teacher_names(config.teachers)
        teachers = {name: one.tags for name, one in zip(names, config.teachers, strict=True)}
        weights = {name: _weight(value) for name, value in pairs(config.kd.tag_weights)}
        files = dict(pairs(config.data.data_tags))
        return cls(teachers, files, weights, tuple(sorted(set(of_prompts))), config.kd.tag_key)

    @property
    def named(self) -> list[str]:
        """Tags that teachers, weights or prompts name, in order."""
        of_teachers = (tag for tags in self.teachers.values() for tag in tags)
        return sorted({*of_teachers, *self.weights, *self.of_prompts})

    def taught_by(self, tag: str) -> list[str]:
        """Return the teachers of a tag; [] if nobody teaches it."""
        naming = [name for name, tags in self.teachers.items() if tag in tags]
        return naming or [name for name, tags in self.teachers.items() if not tags]

    def taught_tags(self, teacher: str) -> TaughtTags:
        """Return the tags of a teacher."""
        others = {tag for name, tags in self.teachers.items() if name != teacher for tag in tags}
        return TaughtTags(self.teachers[teacher], () if self.teachers[teacher] else tuple(sorted(others)))

    def numbers_of(self, teacher: str, names: Sequence[str]) -> frozenset[int]:
        """Return which of the tags `names` the teacher teaches, as their numbers."""
        return frozenset(number for number, tag in enumerate(names) if teacher in self.taught_by(tag))

    def without_teacher(self, tags: Collection[str]) -> list[str]:
        """Return which of the tags have no teacher, or no weight where tags have weights."""
        return [one for one in tags if not self.taught_by(one) or (self.weights and one not in self.weights)]


def pairs(values: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each NAME=VALUE; a text without a value gives ""."""
    for text in values:
        name, _, value = text.rpartition("=")
        yield (name, value) if name else (value, "")


def _weight(text: str) -> float:
    """Return a number, NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def wrong_pairs(config: Config) -> Iterator[UsageError]:
    """Yield a problem for each text that is no NAME=VALUE, and each weight of a tag that is not above 0."""
    for flag, values in (("data-tags", config.data.data_tags), ("tag-weights", config.kd.tag_weights)):
        for name, value in pairs(values):
            if not value:
                what, why = f"{flag}: {name} has no value", "every entry is NAME=VALUE"
                yield UsageError(what, why, f"write {name}=VALUE", code="value-not-valid")
            elif flag == "tag-weights" and not 0 < _weight(value) < inf:
                what, why = (
                    f"tag-weights: {name}={value} is no weight above 0",
                    "they are divided by their sum",
                )
                yield UsageError(what, why, f"write {name}=1 or another number", code="value-not-valid")


def equal_names(rules: TagRules, tags: Collection[str]) -> Iterator[UsageError]:
    """Yield teachers with the name of a tag that is not all that they teach, and they alone."""
    for name, own in rules.teachers.items():
        is_alone = own == (name,) and rules.taught_by(name) == [name]
        if name in tags and not is_alone:
            what, why = f"a teacher and a tag have the name {name}", "both have a metric kd_loss/NAME"
            yield UsageError(what, why, "give the teacher another name", code="names-equal")


def taught_tags(config: Config, teacher: str) -> TaughtTags | None:
    """Return the tags of a teacher; None: it teaches all records."""
    rules = TagRules.of(config)
    return None if rules is None else rules.taught_tags(teacher)
