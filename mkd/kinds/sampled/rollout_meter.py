"""Measure the teachers on the student's completions, on the last stage while a step trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mkd.data.batch import PackedBatch
from mkd.kinds.context.context_term import ContextTeacher
from mkd.kinds.cross_tokenizer.cross_tokenizer_term import CrossTokenizer
from mkd.kinds.sampled.rollout_figures import warn_if_untaught
from mkd.kinds.sampled.rollout_packs import QUARTERS, RolloutRows
from mkd.kinds.sampled.rollout_stream import RolloutStream
from mkd.losses.scores import token_scores
from mkd.models.language_model import LanguageModel
from mkd.models.stored_head import StoredHead
from mkd.parallel.context import ParallelContext
from mkd.parallel.exchange import exchange_rows
from mkd.train.teachers.base import LossInput
from mkd.train.teachers.routed_terms import RunTags
from mkd.train.teachers.same_tokens import SameTokens
from mkd.xtoken.chunks import ChunkSide
from mkd.xtoken.segments import sum_segments

MeasuredTeacher = SameTokens | CrossTokenizer | ContextTeacher
OF_TEACHER = 2 * QUARTERS + 1  # ln p - ln q and tokens of each quarter, -ln q
KL_QUARTERS = tuple(f"rollout/kl_quarter_{i + 1}" for i in range(QUARTERS))
TEACHER_NLL = "rollout/teacher_nll"


@dataclass(frozen=True)
class Measured:
    """A teacher, on all completions or on those of one tag."""

    teacher: MeasuredTeacher
    share: float  # its weight in means over several
    tag: int | None = None  # number of the tag; None: all completions
    tag_name: str = ""


def measured(teachers: Sequence[MeasuredTeacher], tags: RunTags | None) -> list[Measured]:
    """Return the teachers with the completions that each is measured on."""
    if tags is None:
        return [Measured(one, one.share) for one in teachers]
    by_name = {one.name: one for one in teachers}
    taught = [[by_name[name] for name in tags.rules.taught_by(tag)] for tag in tags.names]
    return [
        Measured(one, one.share / sum(other.share for other in of_tag), number, tags.names[number])
        for number, of_tag in enumerate(taught)
        for one in of_tag
    ]


@dataclass(frozen=True)
class _Sampled:
    """The sampled tokens of a micro-batch."""

    rows: Tensor  # [n] int64, ascending: their loss rows
    quarter: Tensor  # [n] int64
    logp: Tensor  # [n] fp64, ln p of the student


@dataclass
class RolloutMeter:
    """Adds up scores of the sampled tokens over the micro-batches of one step.

    ln p(y) - ln q(y), averaged over tokens y that the student sampled at T = 1, estimates KL(p || q) without
    bias. Its gradient is another matter: the loss never uses it. A cross-tokenizer teacher is compared on the
    text of whole chunks: the sums of ln p and of ln q over their tokens. For a teacher with a context these
    are single tokens.
    """

    context: ParallelContext
    stream: RolloutStream
    teachers: Sequence[Measured]
    vocab_size: int  # ids that can be sampled
    student_ids: int | None = None  # ids of the student's ln p; None: those that can be sampled
    _rows: list[RolloutRows] = field(default_factory=list)  # of the micro-batches to come
    _sums: Tensor | None = (
        None  # [teachers * (OF_TEACHER + 1) + 2] fp64; the last: |ln p - sampler's|, tokens
    )

    def start(self) -> None:
        """Prepare for the step of the stream's last micro-batches."""
        self._rows = list(self.stream.rows)
        size = len(self.teachers) * (OF_TEACHER + 1) + 2
        self._sums = torch.zeros(size, dtype=torch.float64, device=self.context.device)

    def __call__(self, given: LossInput) -> None:
        """Add the next micro-batch. Passes over the heads without gradients; see `token_scores`."""
        assert self._sums is not None
        rows, device = self._rows.pop(0), self.context.device
        mine = np.flatnonzero(rows.quarter >= 0)  # on the CPU, which then need not wait for the device
        of_row, quarter, sampler = (
            torch.from_numpy(one).to(device) for one in (mine, rows.quarter[mine], rows.logp[mine])
        )
        places, sampler = given.batch.loss_rows[of_row], sampler.double()
        ids = self.student_ids or self.vocab_size
        student = self._logp(given, given.output.hidden, given.stage.student, places, ids)
        sampled = _Sampled(places, quarter, student)
        tags = _tags_of_rows(given.batch)[mine] if self._is_routed else None
        parts = [part for one in self.teachers for part in self._measure(given, one, sampled, tags)]
        gap = torch.stack([(student - sampler).abs().sum(), student.new_tensor(len(student))])
        self._sums += torch.cat([*parts, gap])

    @property
    def _is_routed(self) -> bool:
        return any(one.tag is not None for one in self.teachers)

    def _measure(
        self, given: LossInput, one: Measured, sampled: _Sampled, tags: np.ndarray | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums [OF_TEACHER] of a teacher, and the tokens [1] that it might teach.

        `tags` [n]: of the sampled tokens.
        """
        if one.tag is not None:
            if one.tag not in given.batch.tags:  # its teacher may not have run
                return sampled.logp.new_zeros(OF_TEACHER), sampled.logp.new_zeros(1)
            which = torch.from_numpy(np.flatnonzero(tags == one.tag)).to(sampled.rows.device)
            sampled = _Sampled(sampled.rows[which], sampled.quarter[which], sampled.logp[which])
        tokens = sampled.logp.new_full((1,), len(sampled.rows))
        if isinstance(one.teacher, SameTokens):
            return self._of_tokens(given, one.teacher, sampled), tokens
        return self._of_chunks(given, one.teacher, sampled), tokens

    def finish(self) -> dict[str, float]:
        """Return the metrics of the step, the stream's included. What no token measures is absent.

        Communication: all-reduce SUM over data, context and pipeline parallelism.
        """
        assert self._sums is not None
        dist.all_reduce(self._sums, group=self.context.copies_group)
        dist.all_reduce(self._sums, group=self.context.pp_group)
        *values, gap, count = self._sums.tolist()
        of_teachers: dict[str, list[tuple[float, float]]] = {}  # (share of the teacher, its mean)
        covered, compared = [], 0.0
        for place, one in enumerate(self.teachers):
            *part, nll, tokens = values[place * (OF_TEACHER + 1) : (place + 1) * (OF_TEACHER + 1)]
            kl, counts = part[:QUARTERS], part[QUARTERS:]
            sums = [*zip(KL_QUARTERS, kl, counts, strict=True), (TEACHER_NLL, nll, sum(counts))]
            compared += sum(counts)
            for name, total, number in sums:
                if number:  # of one tag: a mean over the tokens of all tags
                    share = one.share if one.tag is None else one.share * number
                    of_teachers.setdefault(name, []).append((share, total / number))
            if one.tag is not None and sum(counts):
                by_tag = of_teachers.setdefault(f"{TEACHER_NLL}/{one.tag_name}", [])
                by_tag.append((one.share, nll / sum(counts)))
            if isinstance(one.teacher, CrossTokenizer | ContextTeacher) and tokens:
                covered.append(sum(counts) / tokens)
        found = {
            name: sum(share * value for share, value in parts) / sum(share for share, _ in parts)
            for name, parts in of_teachers.items()
        }
        if count:
            found["rollout/logp_gap"] = gap / count
        if covered:
            found["rollout/coverage"] = min(covered)
        if count and self.teachers and not compared:
            warn_if_untaught(self.stream.iteration)
        return self.stream.figures | found

    def _of_tokens(self, given: LossInput, teacher: SameTokens, sampled: _Sampled) -> Tensor:
        """Return the sums [OF_TEACHER] of a teacher that reads the student's tokens."""
        (index,) = teacher.indices
        model, hidden = given.stage.compared[index], given.output.teacher_hiddens[index]
        logp = self._logp(given, hidden, model, sampled.rows, self.vocab_size)
        return _sums(sampled.logp, logp, torch.ones_like(logp), sampled.quarter)

    def _of_chunks(
        self, given: LossInput, teacher: CrossTokenizer | ContextTeacher, sampled: _Sampled
    ) -> Tensor:
        """Return the sums [OF_TEACHER] of a teacher with its own row, over the chunks of completions."""
        part: Any = given.batch.teacher_inputs[teacher.index]
        chunks = part.chunks
        ours, theirs, count = chunks.student, chunks.teacher, len(chunks.kinds)
        known = {"vocab_size": self.vocab_size} if isinstance(teacher, ContextTeacher) else {}
        scores = teacher.pack_scores(given, **known).scores.label.double()
        of_tokens = _of_chunk_tokens(given, teacher, ours, sampled)
        if not count:  # the heads of all ranks that share the row have run
            return sampled.logp.new_zeros(OF_TEACHER)
        logp, quarter, is_sampled = of_tokens.unbind(1)
        numbers = torch.arange(count, device=scores.device)
        of_student, of_teacher = (
            numbers.repeat_interleave(side.offsets.diff(), output_size=len(side.rows))
            for side in (ours, theirs)
        )
        first = ours.offsets[:-1]
        is_own = is_sampled[first] > 0  # a chunk of stored text is left out
        student, teacher_logp = sum_segments(of_student, logp, count), sum_segments(of_teacher, scores, count)
        tokens = ours.offsets.diff().double()
        return _sums(*(one[is_own] for one in (student, teacher_logp, tokens, quarter[first].long())))

    def _logp(
        self,
        given: LossInput,
        hidden: Tensor,
        model: LanguageModel | StoredHead,
        rows: Tensor,
        vocab_size: int,
    ) -> Tensor:
        """Return ln p of the labels of `rows`, fp64 [n]."""
        scores = token_scores(
            hidden.squeeze(1).detach(),
            model.head_weight(),
            rows,
            given.batch.labels[0, rows],
            tp_group=self.context.tp_group,
            logits_cap=model.shape.logits_cap,
            vocab_size=vocab_size,
            sequence_parallel=given.stage.student.config.sequence_parallel,
        )
        return scores.label.double()


def _of_chunk_tokens(
    given: LossInput, teacher: CrossTokenizer | ContextTeacher, side: ChunkSide, sampled: _Sampled
) -> Tensor:
    """Return the student's ln p, quarter, and 1 if it was sampled, of each token of chunks, fp64 [n, 3].

    Communication: under context parallelism, for a cross-tokenizer teacher, an all-to-all of these values.
    The tokens of its chunks may be on several ranks, and the one with the last token adds the chunk up.
    """
    values = sampled.logp.new_zeros(given.batch.labels.shape[1], 3)
    ones = torch.ones_like(sampled.logp)
    values[sampled.rows] = torch.stack([sampled.logp, sampled.quarter.double(), ones], dim=1)
    if isinstance(teacher, ContextTeacher):
        return values[teacher.student_rows(given.batch)]
    plan, group = side.exchange, given.context.row_group
    if plan is not None:
        values = exchange_rows(values, plan.send_rows, plan.send_counts, plan.receive_counts, group)
    return values[side.rows]


def _tags_of_rows(batch: PackedBatch) -> np.ndarray:
    """Return the number of the tag of each loss row, [n], on the CPU."""
    return np.repeat(np.array(batch.tags), batch.pack_loss_rows)


def _sums(student: Tensor, teacher: Tensor, tokens: Tensor, quarter: Tensor) -> Tensor:
    """Return ln p - ln q and tokens of each quarter, then -ln q, [OF_TEACHER], of rows [n] each."""
    values = torch.stack([student - teacher, tokens]) @ F.one_hot(quarter, QUARTERS).double()
    return torch.cat([values.flatten(), -teacher.sum()[None]])
