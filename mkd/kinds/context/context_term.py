"""A teacher with the student's tokens that reads another prompt, compared on the tokens of completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.losses.lm_head import whole_sequence
from mkd.losses.scores import token_scores
from mkd.parallel.exchange import exchange_rows
from mkd.train.sums import TermSums
from mkd.train.teachers.base import LossInput, PackScores, token_sums
from mkd.train.teachers.chunked import ChunkedTerm
from mkd.train.teachers.same_tokens import head_pass
from mkd.xtoken.segments import sum_by


@dataclass(frozen=True)
class ContextTeacher(ChunkedTerm):
    """A teacher whose row holds the student's completions behind prompts of its own.

    A chunk is one token of a completion. The rank that holds the student's row of it computes its loss.
    """

    name: str
    share: float
    index: int  # number of its model in the stage
    divergence: Mapping[str, Any]  # see `divergence_settings`
    factor: float = 1.0

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        chunks, rows = self._chunks(given.batch), self.student_rows(given.batch)
        weights = torch.zeros_like(given.batch.loss_mask[0])
        weights[rows] = given.pack_weights[self.name][chunks.packs]
        settings = dict(self.divergence, compact=(rows, self._states(given)))
        output = head_pass(given, weights, scale, (self.index,), kd_ratio=1.0, **settings)
        sums = token_sums(output, given, weights.sum())
        return output.loss, replace(sums, student_ce=0.0, rows=len(rows))

    def pack_scores(self, given: LossInput, vocab_size: int | None = None) -> PackScores:
        """Return its predictions over the first `vocab_size` ids, by default over all that it knows."""
        chunks, model = self._chunks(given.batch), given.stage.compared[self.index]
        rows = self.student_rows(given.batch)
        scores = token_scores(
            self._states(given),
            model.head_weight(),
            torch.arange(len(rows), device=rows.device),
            given.batch.labels[0, rows],
            tp_group=given.context.tp_group,
            logits_cap=model.shape.logits_cap,
            vocab_size=vocab_size or model.shape.vocab_size,
        )
        covered = sum_by(chunks.packs, torch.ones(len(rows), device=rows.device), given.num_packs)
        return PackScores(scores, chunks.packs, covered)

    def student_rows(self, batch: PackedBatch) -> Tensor:
        """Return the student's rows that are compared on this rank, int64 [n]."""
        side = self._chunks(batch).student
        # Under context parallelism a chunk's owner holds its row: it sends it to nobody else.
        return side.rows if side.exchange is None else side.exchange.send_rows[side.rows]

    @torch.no_grad()
    def _states(self, given: LossInput) -> Tensor:
        """Return the teacher's final states for these rows, [n, h].

        Communication: with sequence parallelism an all-gather of its row over the tensor-parallel group, with
        context parallelism an all-to-all of the compared rows.
        """
        side, is_parallel = self._chunks(given.batch).teacher, given.stage.student.config.sequence_parallel
        hidden = given.output.teacher_hiddens[self.index].squeeze(1)
        hidden = whole_sequence(hidden, given.context.tp_group, is_parallel)
        if side.exchange is not None:
            one = side.exchange
            group = given.context.row_group
            hidden = exchange_rows(hidden, one.send_rows, one.send_counts, one.receive_counts, group)
        return hidden.index_select(0, side.rows)
