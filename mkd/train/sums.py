"""The sums that micro-batches report, and the one division that turns them into means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

Number = Tensor | float | None
"""A sum of one micro-batch: a 0-dim tensor, a Python number, or None if not computed (counts as 0)."""

CROSS_ENTROPY = "cross entropy"
DATA = "data term"
OF_NO_TEACHER = (CROSS_ENTROPY, DATA)
"""Names of the terms that belong to no teacher; the blank keeps them apart from the names of teachers."""

TAG_TOKENS = "tag_tokens"  # measure of a term of one tag: the tag's loss tokens
TAG_CHUNKS = "tag_chunks"  # its rows, if it is a mean over chunks that counts with the tag's share of tokens
OWN_CHUNKS = "own_chunks"  # its rows, if it is a mean over chunks that counts with the tag's weight


def term_name(name: str, tag: str) -> str:
    """Return the name of a term on the records of one tag."""
    return f"{name}/{tag}"


def is_of_teacher(name: str) -> bool:
    """Return True if a term of this name belongs to a teacher."""
    return name.partition("/")[0] not in OF_NO_TEACHER


FEEDBACK_LOSS = "feedback_loss"  # metric of the loss of judged answers


@dataclass(frozen=True)
class TermSums:
    """The sums of one term of the loss over its rows.

    Rows are loss tokens, or the aligned chunks of a cross-tokenizer teacher. A row counts with the teacher's
    weight in its pack. The cross entropy alone fills `student_ce` only. A data term (see `DataTerm`) fills
    `feedback`, `rows` (such as pairs, or a sum of weights) and its `measures`.
    """

    student_ce: Number = 0.0  # the student's cross entropy, nats, if this term computed it
    kd: Number = 0.0  # weighted divergence, temperature scaling included
    weight: Number = 0.0  # weight of all rows
    rows: Number = 0.0
    ce: Number = 0.0  # the teacher's own cross entropy, nats ...
    entropy: Number = 0.0  # ... and its entropy, ...
    tokens: Number = 0.0  # ... both over this number of tokens
    top1_agreement: Number = 0.0
    compared: Number = 0.0  # rows that count for `top1_agreement`
    feedback: Any = 0.0  # loss of a data term
    measures: Mapping[str, Any] = field(default_factory=dict)  # sums over rows by metric key

    def __add__(self, other: TermSums) -> TermSums:
        numbers = {name: getattr(self, name) + getattr(other, name) for name in NUMBERS}
        names = {**self.measures, **other.measures}  # teachers of one tag may measure different things
        both = {name: self.measures.get(name, 0.0) + other.measures.get(name, 0.0) for name in names}
        return TermSums(**numbers, measures=both)


NUMBERS = tuple(part.name for part in fields(TermSums) if part.name != "measures")


@dataclass(frozen=True)
class ReportLayout:
    """The order of the sums in the vector that a micro-batch reports, the same on all ranks."""

    terms: Sequence[str]  # names
    measures: Mapping[str, Sequence[str]] = field(default_factory=dict)  # term -> keys of its measures
    loss_key: str = FEEDBACK_LOSS  # of the data term, if there is one; see `DataTerm`
    has_cross_entropy: bool = False  # the data term reports it too

    @property
    def size(self) -> int:
        num_measures = sum(len(keys) for keys in self.measures.values())
        return 1 + len(self.terms) * len(NUMBERS) + num_measures

    def to_vector(self, num_loss_tokens: Tensor, terms: Mapping[str, TermSums]) -> Tensor:
        """Return the sums of one micro-batch as a vector, fp64 [size], on the device of `num_loss_tokens`."""
        values: list[Number] = [num_loss_tokens]
        values += [getattr(terms[name], number) for name in self.terms for number in NUMBERS]
        values += [terms[name].measures[key] for name, keys in self.measures.items() for key in keys]
        zero = torch.zeros((), dtype=torch.float64, device=num_loss_tokens.device)
        return torch.stack([_as_double(value, zero) for value in values])

    def from_vector(self, vector: Tensor, kd_ratio: float) -> LossSums:
        """Return the sums of added-up vectors [size]. Waits for the device."""
        num_loss_tokens, *values = vector.tolist()
        left = iter(values)
        terms = {name: TermSums(**{number: next(left) for number in NUMBERS}) for name in self.terms}
        for name, keys in self.measures.items():
            terms[name] = replace(terms[name], measures={key: next(left) for key in keys})
        return LossSums(
            kd_ratio,
            ce=sum(one.student_ce for one in terms.values()),
            num_loss_tokens=int(num_loss_tokens),
            teachers={name: one for name, one in terms.items() if is_of_teacher(name)},
            feedback=terms.get(DATA),
            loss_key=self.loss_key,
            has_cross_entropy=self.has_cross_entropy or DATA not in terms,
            tags=_by_tag(terms),
        )


def _by_tag(terms: Mapping[str, TermSums]) -> dict[str, tuple[float, float]]:
    """Return tag -> (the student's cross entropy, loss tokens), of terms with a tag."""
    found: dict[str, tuple[float, float]] = {}
    for name, one in terms.items():
        _, slash, tag = name.partition("/")
        if slash:
            ce, tokens = found.get(tag, (0.0, 0.0))
            assert isinstance(one.student_ce, float), "sums are numbers here"
            found[tag] = ce + one.student_ce, max(tokens, one.measures[TAG_TOKENS])
    return found


def _as_double(value: Number, zero: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().double()
    return zero + value if value else zero


@dataclass(frozen=True)
class LossSums:
    """The sums of a global batch, of the steps of a log interval, or of a whole evaluation."""

    kd_ratio: float
    ce: float
    num_loss_tokens: int
    teachers: Mapping[str, TermSums]  # by name
    auxiliary: Mapping[str, float] = field(default_factory=dict)  # name -> sum over the loss tokens
    num_steps: int = 1
    feedback: TermSums | None = None  # of the data term, which takes the place of the cross entropy
    loss_key: str = FEEDBACK_LOSS  # metric of the data term's loss
    has_cross_entropy: bool = False  # `ce` is known beside a data term
    # Tag -> (the student's cross entropy, loss tokens). Its teachers have names TEACHER/TAG in `teachers`.
    tags: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __add__(self, other: LossSums) -> LossSums:
        """Return the sums of both together. Both must have the same teachers and auxiliary losses."""
        return LossSums(
            self.kd_ratio,
            self.ce + other.ce,
            self.num_loss_tokens + other.num_loss_tokens,
            {name: one + other.teachers[name] for name, one in self.teachers.items()},
            {name: one + other.auxiliary[name] for name, one in self.auxiliary.items()},
            self.num_steps + other.num_steps,
            self.feedback + other.feedback if self.feedback and other.feedback else None,
            self.loss_key,
            self.has_cross_entropy,
            {tag: (ce + other.tags[tag][0], n + other.tags[tag][1]) for tag, (ce, n) in self.tags.items()},
        )

    def named_as(self, other: LossSums) -> LossSums | None:
        """Return the sums under the names of `other`, teacher by teacher; None if the losses differ.

        A resumed run may list its teachers in another order, or name one differently, which then is at its
        old place. It may have another loss if the user accepted that.
        """
        is_same = self.kd_ratio == other.kd_ratio and self.auxiliary.keys() == other.auxiliary.keys()
        measures = [one.feedback and one.feedback.measures.keys() for one in (self, other)]
        is_same = is_same and self.loss_key == other.loss_key and self.tags.keys() == other.tags.keys()
        if not is_same or len(self.teachers) != len(other.teachers) or measures[0] != measures[1]:
            return None
        if self.teachers.keys() == other.teachers.keys():
            return self
        return replace(self, teachers=dict(zip(other.teachers, self.teachers.values(), strict=True)))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LossSums:
        """Return the sums from their `asdict`, as saved in JSON."""
        teachers = {name: TermSums(**one) for name, one in state["teachers"].items()}
        feedback = TermSums(**state["feedback"]) if state.get("feedback") else None
        return cls(**{**state, "teachers": teachers, "feedback": feedback})

    @property
    def kd_mean(self) -> float:
        """Sum over the teachers of their weighted divergences, each a mean over its own rows."""
        return sum(self._share(name) * mean(one.kd, one.rows) for name, one in self.teachers.items())

    def _share(self, term: str) -> float:
        """Return the part of a term's mean in `kd_mean`: the tag's share of all loss tokens, or 1."""
        if TAG_CHUNKS not in self.teachers[term].measures:
            return 1.0
        return mean(self.tags[term.partition("/")[2]][1], self.num_loss_tokens)

    def token_sums(self) -> dict[str, float]:
        """Return metric name -> sum over `num_loss_tokens`.

        The names are `loss`, `ce`, `kd`, `teacher_ce`, `teacher_entropy`, `top1_agreement`,
        `auxiliary_loss/<name>` for each auxiliary loss, and the loss and the measures of the data term. A
        teacher's own metrics are weighted as the teachers are. All but `ce` are means times
        `num_loss_tokens`, because other rows may differ from the loss tokens.
        """
        count, data = self.num_loss_tokens, self.feedback
        kd = self.kd_mean * count
        of_data = self.ce if data is None else mean(data.feedback, data.rows) * count
        loss = (1 - self.kd_ratio) * of_data + self.kd_ratio * kd + sum(self.auxiliary.values())
        sums = {"loss": loss, "ce": self.ce, "kd": kd}
        of_teachers = self.teachers.items()
        shares = [(self._share(name) * mean(one.weight, one.rows), one) for name, one in of_teachers]
        total = sum(share for share, _ in shares)
        for name, part, out_of in (
            ("teacher_ce", "ce", "tokens"),
            ("teacher_entropy", "entropy", "tokens"),
            ("top1_agreement", "top1_agreement", "compared"),
        ):
            value = sum(share * mean(getattr(one, part), getattr(one, out_of)) for share, one in shares)
            sums[name] = mean(value, total) * count
        sums |= {f"auxiliary_loss/{name}": value for name, value in self.auxiliary.items()}
        if data is not None:
            sums[self.loss_key] = of_data
            sums |= {key: mean(value, data.rows) * count for key, value in data.measures.items()}
        return sums | {"num_loss_tokens": count}

    def per_teacher(self) -> dict[str, tuple[float, float]]:
        """Return metric key -> (sum, divisor). `kd_mean` is the sum of `teacher_weight` * `kd_loss`."""
        metrics = {}
        for name, one in self._routed("teacher").items() if self.tags else self.teachers.items():
            metrics[f"kd_loss/{name}"] = (one.kd, one.weight)
            metrics[f"teacher_weight/{name}"] = (one.weight, one.rows)
            metrics[f"teacher_ce/{name}"] = (one.ce, one.tokens)
            metrics[f"teacher_entropy/{name}"] = (one.entropy, one.tokens)
            metrics[f"top1_agreement/{name}"] = (one.top1_agreement, one.compared)
            metrics[f"num_aligned/{name}"] = (_aligned(one), self.num_steps)
        return metrics

    def _routed(self, by: str) -> dict[str, TermSums]:
        """Return the sums of all terms of each teacher, or of each tag; `rows` is 1."""
        found: dict[str, TermSums] = {}
        for term, one in self.teachers.items():
            teacher, _, tag = term.partition("/")
            name = teacher if by == "teacher" else tag
            kd, weight = (self._share(term) * mean(of, one.rows) for of in (one.kd, one.weight))
            part = replace(one, kd=kd, weight=weight, rows=1.0)
            found[name] = replace(found[name] + part, rows=1.0) if name in found else part
        return found

    def per_tag(self, with_ce: bool) -> dict[str, tuple[float, float]]:
        """Return metric key -> (sum, divisor); none without tags.

        A data term measures all tags together, so that no cross entropy of a tag is known beside it.
        """
        if not self.tags:
            return {}
        metrics = {f"kd_loss/{tag}": (one.kd, one.weight) for tag, one in self._routed("tag").items()}
        metrics |= {f"tokens/{tag}": (tokens, 1) for tag, (_, tokens) in self.tags.items()}
        if with_ce and self.feedback is None:
            metrics |= {f"ce/{tag}": (ce, tokens) for tag, (ce, tokens) in self.tags.items()}
        return metrics


def _aligned(one: TermSums) -> float:
    """Return the rows on which a teacher is compared; of one with tags, `rows` may be those of all tags."""
    found = (one.measures[key] for key in (TAG_CHUNKS, OWN_CHUNKS, TAG_TOKENS) if key in one.measures)
    return next(found, one.rows)


def mean(total: float, count: float) -> float:
    """Return total / count, or 0 if there is nothing to divide by."""
    return total / count if count else 0.0
