"""The tags of documents and packs, and the teachers that a micro-batch needs.

With tags, every pack holds documents of one tag. Tags are numbered alike in all data sets of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mkd.config.tag_rules import TagRules, equal_names
from mkd.data.corpus.store import TokenStore
from mkd.errors import DataError, UsageError
from mkd.human import counted

LOG = logging.getLogger("mkd")
UNTAGGED = -1  # of an empty pack


@dataclass(frozen=True)
class CorpusTags:
    """The tags of one corpus as a run numbers them."""

    names: tuple[str, ...]  # of all tags of the run
    numbers: tuple[int, ...]  # number in the corpus -> number in the run; UNTAGGED if no document has it

    def of_documents(self, store: TokenStore, documents: np.ndarray) -> np.ndarray:
        """Return the run's numbers of the tags of documents, int64."""
        return np.array(self.numbers)[store.tags_of(documents)]


@dataclass(frozen=True)
class TaggedDocuments:
    """Documents [first, last) of a corpus, whose file may have a tag."""

    store: TokenStore
    documents: tuple[int, int]
    path: str  # as the user has named it
    file_tag: str | None

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return tag -> (documents, tokens). Raises DataError if a document has none."""
        first, last = self.documents
        numbers = self.store.tags_of(np.arange(first, last))
        lengths = self.store.lengths_between(first, last)
        size = len(self.store.tag_names)
        documents, tokens = np.bincount(numbers, minlength=size), np.bincount(numbers, lengths, size)
        found: dict[str, tuple[int, int]] = {}
        for number, name in enumerate(self.store.tag_names):
            if not documents[number]:
                continue
            tag = name or self.file_tag
            if tag is None:
                ((path, line),) = self.store.places([first + int(np.argmax(numbers == number))])
                raise DataError(
                    f"{path}:{line}: the record has no tag, as {counted(int(documents[number]), 'document')} "
                    f"of {self.path}",
                    "--teacher-combination route chooses the teachers of a record by its tag",
                    f"give the records a tag (--tag-key), or the file one: --data-tags {self.path}=TAG",
                    code="record-value-not-valid",
                )
            before = found.get(tag, (0, 0))
            found[tag] = before[0] + int(documents[number]), before[1] + int(tokens[number])
        return found

    def numbered(self, names: Sequence[str]) -> CorpusTags:
        """Return the corpus's tags with their numbers in `names`."""
        tags = [name or self.file_tag for name in self.store.tag_names]
        return CorpusTags(tuple(names), tuple(names.index(t) if t in names else UNTAGGED for t in tags))


def tags_of_run(rules: TagRules, parts: Iterable[TaggedDocuments]) -> tuple[str, ...]:
    """Return all tags of a run, sorted: of its documents and prompts, of teachers and of weights.

    Log how much text each has. Raises DataError for a document without a tag, and UsageError
    for a tag that nobody teaches, or with the name of a teacher that has other tags too.
    """
    found: dict[str, tuple[int, int]] = {}
    for part in parts:
        require_tag_key(part.store, rules, part.path)
        for tag, (documents, tokens) in part.counts().items():
            before = found.get(tag, (0, 0))
            found[tag] = before[0] + documents, before[1] + tokens
    require_teachers(rules, found)
    require_teachers(rules, rules.of_prompts, "the prompts")
    for problem in equal_names(rules, {*found, *rules.named}):
        raise problem
    for tag, (documents, tokens) in sorted(found.items()):
        teachers = " and ".join(rules.taught_by(tag))
        LOG.info(f"tag {tag}: {counted(documents, 'document')}, {tokens} tokens, taught by {teachers}")
    for tag in rules.of_prompts:
        LOG.info(f"prompts of the tag {tag}: taught by {' and '.join(rules.taught_by(tag))}")
    warn_of_idle(rules, {*found, *rules.of_prompts})
    return tuple(sorted({*found, *rules.named}))


def require_tag_key(store: TokenStore, rules: TagRules, path: str) -> None:
    """Raise DataError unless the tokenised corpus at `path` has the tags that the run reads."""
    again = "make it again: mkd preprocess" + (
        f" --tag-key {rules.key}" if rules.key else " without --tag-key"
    )
    if store.tags is not None:
        known = store.meta.get("tag_key")
        if known != rules.key:
            of = f"by the key {known}" if known else "by a key that it does not name"
            what = f"{path} was tokenised with tags {of}, but " + (
                f"tag-key is {rules.key}" if rules.key else "the run has no tag-key"
            )
            why = "these tags would choose the teachers of its records"
            do = f"give --tag-key {known}, or {again}" if known else again
            raise DataError(what, why, do, code="corpus-of-another-model")
    elif rules.key and path not in rules.files:
        what = f"{path} was tokenised without the tags of its records"
        why = f"--teacher-combination route chooses the teachers of a record by its {rules.key}"
        do = f"{again}; or give all its records one tag: --data-tags {path}=TAG"
        raise DataError(what, why, do, code="corpus-of-another-model")


def require_teachers(rules: TagRules, tags: Iterable[str], of: str = "the data") -> None:
    """Raise UsageError if one of the `tags` has no teacher, or no weight where tags have weights."""
    missing = rules.without_teacher(sorted(tags))
    if not missing:
        return
    untaught = [tag for tag in missing if not rules.taught_by(tag)]
    if untaught:
        known = "; ".join(
            f"{name} teaches {', '.join(tags)}" for name, tags in rules.teachers.items() if tags
        )
        raise UsageError(
            f"no teacher has the tag {' or '.join(untaught)} of {of}",
            f"{known}, and no teacher is without tags",
            "add the tag to a teacher's tags, or give one teacher no tags: it takes what no other names",
            code="add-flag",
        )
    raise UsageError(
        f"tag-weights has no weight for {' or '.join(missing)} of {of}",
        "the weight of every tag decides its part in the loss",
        f"add {missing[0]}=NUMBER, or remove tag-weights",
        code="add-flag",
    )


def warn_of_idle(rules: TagRules, tags: Iterable[str]) -> None:
    """Warn of teachers that no record needs."""
    busy = {name for tag in tags for name in rules.taught_by(tag)}
    for name, own in rules.teachers.items():
        if name not in busy:
            what = f"the tag {' or '.join(own)}" if own else "a tag that no other teacher names"
            LOG.warning(f"teacher {name} never runs: no record has {what}")


@dataclass(frozen=True)
class TeacherRoutes:
    """Which teachers a micro-batch needs. A teacher runs for all replicas that compute in step with it."""

    tags: tuple[frozenset[int], ...]  # of each teacher
    replicas: tuple[tuple[int, ...], ...]  # for each: the data-parallel ranks that run it together

    def needed(self, tags: np.ndarray) -> tuple[bool, ...]:
        """Return whether each teacher is needed; `tags` [replicas, packs] are those of a micro-batch."""
        return tuple(
            not own.isdisjoint(tags[list(replicas)].ravel().tolist())
            for own, replicas in zip(self.tags, self.replicas, strict=True)
        )

    @classmethod
    def of(
        cls, rules: TagRules, names: Sequence[str], replicas: Mapping[str, Sequence[int]]
    ) -> TeacherRoutes:
        """Return the routes of the teachers in `replicas`, by name; `names` are the run's tags."""
        own = (rules.numbers_of(name, names) for name in replicas)
        return cls(tuple(own), tuple(map(tuple, replicas.values())))
