"""Terms of the loss for records with tags: each compares one teacher with the student on packs of one tag.

    kd = sum over tags g of  s_g / M_g  *  sum over rows r of g and teachers i of g of  w_i * s(T_i) * D_i(r)

w_i is the teacher's weight divided by those of all teachers of the tag. By default s_g / M_g is 1 over the
loss tokens of the whole global batch. With weights of tags, s_g is the weight of the tag divided by the sum
of all, and M_g the number of the tag's loss tokens in the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.config.tag_rules import TagRules
from mkd.data.batch import PackedBatch
from mkd.train.sums import OWN_CHUNKS, TAG_CHUNKS, TAG_TOKENS, TermSums, term_name
from mkd.train.teachers.base import LossInput, Teacher, Term
from mkd.train.teachers.same_tokens import CrossEntropy


@dataclass(frozen=True)
class RunTags:
    """The tags of a run, as its packs number them, and their teachers."""

    names: tuple[str, ...]
    rules: TagRules

    def share(self, tag: str) -> float:
        """Return the weight of a tag, divided by the sum of all weights; 1 if tags have no weights."""
        weights = self.rules.weights
        return weights.get(tag, 0.0) / sum(weights.values()) if weights else 1.0


@dataclass(frozen=True)
class Routed:
    """A term of the loss on the packs of one tag. Only their rows pass the heads."""

    inner: Any  # Term
    tag: int
    tag_name: str
    weight: float = 1.0  # of the teacher among those of the tag
    tag_share: float = 1.0  # in the reported divergence, see `RunTags.share`
    has_own_mean: bool = False  # over the tag's tokens alone, or its chunks
    has_chunks: bool = False  # rows are those of a teacher with another tokenizer or a context
    takes_empty: bool = False  # runs, without any row, for a micro-batch of empty packs

    @property
    def name(self) -> str:
        return term_name(self.inner.name, self.tag_name)

    @property
    def factor(self) -> float:
        return self.inner.factor

    @property
    def measures(self) -> tuple[str, ...]:
        return (*self.inner.measures, TAG_TOKENS, *([self._chunks_key] if self.has_chunks else []))

    @property
    def _chunks_key(self) -> str:
        return TAG_CHUNKS if self.is_shared_by_tokens else OWN_CHUNKS

    @property
    def is_shared_by_tokens(self) -> bool:
        """True if the term is a mean over chunks times the tag's share of all loss tokens."""
        return self.has_chunks and not self.has_own_mean

    @property
    def has_autograd_head(self) -> bool:
        return getattr(self.inner, "has_autograd_head", False)

    def num_rows(self, batch: PackedBatch) -> float:
        if self.has_chunks:  # of packs without its tag it has none
            return self.inner.num_rows_of(batch, self._packs(batch))
        return self.num_tokens(batch) if self.has_own_mean else batch.num_loss_tokens

    def num_tokens(self, batch: PackedBatch) -> int:
        """Return the tag's loss tokens in a micro-batch."""
        return sum(batch.pack_loss_tokens[number] for number in self._packs(batch))

    def _packs(self, batch: PackedBatch) -> list[int]:
        return [number for number, tag in enumerate(batch.tags) if tag == self.tag]

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        packs = self._packs(given.batch)
        is_empty = self.takes_empty and all(tag < 0 for tag in given.batch.tags)
        rows = given.num_loss_tokens
        if not packs and not is_empty:
            measures: dict[str, Any] = dict.fromkeys(self.measures, 0.0)
            return rows.new_zeros((), dtype=torch.float32), TermSums(
                rows=0.0 if self.has_own_mean or self.has_chunks else rows, measures=measures
            )
        part = self._part(given, packs)
        loss, sums = self.inner.loss(part, scale)
        tokens = part.num_loss_tokens
        rows = tokens if self.has_own_mean else rows
        measures = {**sums.measures, TAG_TOKENS: tokens}
        if self.has_chunks:
            rows = self.inner.rows_of(part)
            measures[self._chunks_key] = rows
        return loss, replace(
            sums,
            kd=_times(sums.kd, self.tag_share),
            weight=_times(sums.weight, self.tag_share),
            rows=rows,
            measures=measures,
        )

    def _part(self, given: LossInput, packs: Sequence[int]) -> LossInput:
        """Return the input whose only rows with loss are those of `packs`."""
        batch = given.batch
        size = batch.loss_mask.shape[1] // given.num_packs
        mask = torch.zeros_like(batch.loss_mask)
        weights = torch.zeros(given.num_packs, device=mask.device)
        for number in packs:  # slices, which do not wait for the device as an index would
            span = slice(number * size, (number + 1) * size)
            mask[:, span] = batch.loss_mask[:, span]
            weights[number] = self.weight
        counts = [count if n in packs else 0 for n, count in enumerate(batch.pack_loss_tokens)]
        own = replace(batch, loss_mask=mask, loss_rows=batch.loss_rows_of(packs), num_loss_tokens=sum(counts))
        return replace(given, batch=own, pack_weights={self.inner.name: weights})


@dataclass(frozen=True)
class TagTokens:
    """Counts the loss tokens of a tag, or of all tags."""

    term: Routed | None  # None: all

    def num_rows(self, batch: PackedBatch) -> int:
        return batch.num_loss_tokens if self.term is None else self.term.num_tokens(batch)


def tokens_to_count(terms: Sequence[Term]) -> list[TagTokens]:
    """Return what the global batch has to count besides the rows of terms: see `with_token_shares`."""
    shared = [one for one in terms if isinstance(one, Routed) and one.is_shared_by_tokens]
    return [*map(TagTokens, shared), TagTokens(None)] if shared else []


def with_token_shares(inverse_counts: Tensor, terms: Sequence[Term], tokens: Tensor) -> Tensor:
    """Return 1 / rows of each term, times its tag's share of all loss tokens where that is its weight.

    `tokens` [n] fp64 are the counts of `tokens_to_count`.
    """
    places = [n for n, one in enumerate(terms) if isinstance(one, Routed) and one.is_shared_by_tokens]
    for place, count in zip(places, tokens[:-1], strict=False):
        inverse_counts[place] *= (count / tokens[-1].clamp(min=1)).float()
    return inverse_counts


def _times(value: Any, factor: float) -> Any:
    return value if value is None or factor == 1 else value * factor


def routed_terms(
    kd: KDConfig, tags: RunTags, teachers: Sequence[Teacher], with_ce_metric: bool, has_data_term: bool
) -> tuple[Term, ...]:
    """Return the terms of the loss of all tags, and of the cross entropy unless there is a data term.

    If every tag has one teacher and all tags one mean, the teacher's pass computes the cross entropy too.
    """
    by_name: dict[str, Any] = {one.name: one for one in teachers}
    taught = {tag: [by_name[name] for name in tags.rules.taught_by(tag)] for tag in tags.names}
    has_ce = (kd.kd_ratio < 1 or with_ce_metric) and not has_data_term
    in_one_pass = not tags.rules.weights and not has_data_term
    in_one_pass &= all(len(of) == 1 and of[0].can_take_cross_entropy for of in taught.values())
    found: list[Routed] = []
    for number, (tag, of_tag) in enumerate(taught.items()):
        common: dict[str, Any] = dict(
            tag=number, tag_name=tag, tag_share=tags.share(tag), has_own_mean=bool(tags.rules.weights)
        )
        if in_one_pass:
            found.append(Routed(of_tag[0].with_cross_entropy(kd.kd_ratio, with_ce_metric), **common))
            continue
        if has_ce:
            found.append(Routed(CrossEntropy(factor=1 - kd.kd_ratio), number, tag))
        total = sum(one.share for one in of_tag)
        for one in of_tag:
            inner = replace(one, factor=kd.kd_ratio * common["tag_share"])
            chunks = hasattr(one, "num_rows_of")
            found.append(Routed(inner, weight=one.share / total, has_chunks=chunks, **common))
    return (replace(found[0], takes_empty=True), *found[1:])
