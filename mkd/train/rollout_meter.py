"""Measure the teachers on the student's completions, on the last stage while a step trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mkd.losses.scores import token_scores
from mkd.models.language_model import LanguageModel
from mkd.parallel.context import ParallelContext
from mkd.rollout.rollout_packs import QUARTERS, RolloutRows
from mkd.rollout.rollout_stream import RolloutStream
from mkd.train.sums import mean
from mkd.train.teachers.base import LossInput
from mkd.train.teachers.same_tokens import SameTokens


@dataclass
class RolloutMeter:
    """Adds up scores of the sampled tokens over the micro-batches of one step.

    ln p(y) - ln q(y), averaged over tokens y that the student sampled at T = 1, estimates KL(p || q) without
    bias. Its gradient is another matter: the loss never uses it.
    """

    context: ParallelContext
    stream: RolloutStream
    teachers: Sequence[SameTokens]
    vocab_size: int  # ids that can be sampled
    _rows: list[RolloutRows] = field(default_factory=list)  # of the micro-batches to come
    _sums: Tensor | None = None  # [2 * QUARTERS + 2] fp64

    def start(self) -> None:
        """Prepare for the step of the stream's last micro-batches."""
        self._rows = list(self.stream.rows)
        self._sums = torch.zeros(2 * QUARTERS + 2, dtype=torch.float64, device=self.context.device)

    def __call__(self, given: LossInput) -> None:
        """Add the next micro-batch. Two passes over the heads without gradients; see `token_scores`."""
        assert self._sums is not None
        rows, device = self._rows.pop(0), self.context.device
        quarter = torch.from_numpy(rows.quarter).to(device)
        mine = quarter >= 0
        places, quarter = given.batch.loss_rows[mine], quarter[mine]
        sampler = torch.from_numpy(rows.logp).to(device)[mine].double()
        student = self._logp(given, given.output.hidden, given.stage.student, places)
        teacher = torch.zeros_like(student)
        for one in self.teachers:
            (index,) = one.indices
            model, hidden = given.stage.teachers[index], given.output.teacher_hiddens[index]
            teacher += one.share * self._logp(given, hidden, model, places)
        values = torch.stack([student - teacher, torch.ones_like(student)])
        per_quarter = values @ F.one_hot(quarter, QUARTERS).double()
        totals = torch.stack([-teacher.sum(), (student - sampler).abs().sum()])
        self._sums += torch.cat([per_quarter.flatten(), totals])

    def finish(self) -> dict[str, float]:
        """Return the metrics of the step, the stream's included.

        Communication: all-reduce SUM over data, context and pipeline parallelism.
        """
        assert self._sums is not None
        dist.all_reduce(self._sums, group=self.context.dp_cp_group)
        dist.all_reduce(self._sums, group=self.context.pp_group)
        values = self._sums.tolist()
        kl, counts, (nll, gap) = values[:QUARTERS], values[QUARTERS : 2 * QUARTERS], values[2 * QUARTERS :]
        found = {
            f"rollout/kl_quarter_{i + 1}": mean(*pair) for i, pair in enumerate(zip(kl, counts, strict=True))
        }
        count = sum(counts)
        found["rollout/teacher_nll"] = mean(nll, count)
        found = found if self.teachers else {}
        return self.stream.figures | found | {"rollout/logp_gap": mean(gap, count)}

    def _logp(self, given: LossInput, hidden: Tensor, model: LanguageModel, rows: Tensor) -> Tensor:
        """Return ln p of the labels of `rows`, fp64 [n]."""
        scores = token_scores(
            hidden.squeeze(1).detach(),
            model.head_weight(),
            rows,
            given.batch.labels[0, rows],
            tp_group=self.context.tp_group,
            vocab_size=self.vocab_size,
            sequence_parallel=model.config.sequence_parallel,
        )
        return scores.label.double()
