"""The loss of one micro-batch whose teacher is stored: only the student's head runs, on the rows that have loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.losses import KDOutput, vocab_parallel_topk_kd
from mkd.losses.fused_linear import head_logits, whole_sequence
from mkd.losses.softmax import compute_dtype
from mkd.models.language_model import LanguageModel
from mkd.train.teachers.teacher_loss import TeacherLoss


def topk_loss(
    teacher: TeacherLoss,  # its temperature is that of the stored log-probabilities
    kd_ratio: float,  # share of the divergence, 0 to 1
    student: LanguageModel,
    batch: PackedBatch,  # with `teacher`
    hidden: Tensor,  # [t(/tp with sequence parallelism), 1, h], final
    tp_group: dist.ProcessGroup,
    with_ce_metric: bool,
) -> KDOutput:
    """Sums over the loss tokens of the micro-batch, fp32 scalars in nats; `loss` has the graph.

    Collectives over `tp_group`, those of `vocab_parallel_topk_kd`.
    """
    rows, stored = batch.loss_rows, batch.teacher
    labels = batch.labels[0, rows]
    return vocab_parallel_topk_kd(
        loss_row_logits(student, hidden, rows),
        stored.ids,
        stored.logprobs,
        labels,
        batch.loss_mask[0, rows],
        tp_group=tp_group,
        student_vocab_size=student.shape.vocab_size,
        teacher_vocab_size=stored.vocab_size,
        kd_ratio=kd_ratio,
        temperature=teacher.divergence["temperature"],
        temperature_scaling=teacher.divergence["temperature_scaling"],
        with_ce_metric=with_ce_metric,
        teacher_metrics=stored.metrics,
        overwrite_student_logits=True,
    )


def loss_row_logits(model: LanguageModel, hidden: Tensor, rows: Tensor) -> Tensor:
    """Logits [n, v/tp] of the positions `rows` [n] of a final hidden state [t(/tp), 1, h]; fp32 where no gradient is asked for.

    Rows without loss skip the head, but in training with sequence parallelism: there the head gathers the rows of all ranks.
    """
    if not torch.is_grad_enabled():
        states = whole_sequence(
            hidden.squeeze(1), model.pg_collection.tp, model.config.sequence_parallel
        ).index_select(0, rows)
        return model.use_head(lambda weight: head_logits(states, weight, compute_dtype(states)))
    if model.config.sequence_parallel:
        return model.logits(hidden).squeeze(1).index_select(0, rows)
    return model.logits(hidden.index_select(0, rows)).squeeze(1)
