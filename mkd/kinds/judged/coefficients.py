"""Coefficient losses: -sum over tokens of c ln p(token), where the coefficients c have no gradient.

Such a loss has the gradient of a cross entropy whose rows have the weights c, of any sign, so one pass of the
fused head makes it. The coefficients come from log-probabilities that a pass without gradient scores before.
"""

from __future__ import annotations

from torch import Tensor

from mkd.losses.scores import token_scores
from mkd.models.language_model import LanguageModel
from mkd.models.stored_head import StoredHead
from mkd.train.teachers.base import LossInput
from mkd.train.teachers.same_tokens import head_pass


def student_logp(given: LossInput, vocab_size: int | None = None) -> Tensor:
    """Return ln p of the label of each loss row under the student, fp32 [n], without gradient.

    p is over the first `vocab_size` ids; None: over all that the student knows.
    """
    return _logp(given, given.output.hidden, given.stage.student, vocab_size)


def reference_logp(given: LossInput, index: int) -> Tensor:
    """Return ln p of each loss row's label under frozen model `index` of the stage, fp32 [n], all ids."""
    return _logp(given, given.output.teacher_hiddens[index], given.stage.compared[index])


def _logp(
    given: LossInput, hidden: Tensor, model: LanguageModel | StoredHead, vocab_size: int | None = None
) -> Tensor:
    rows = given.batch.loss_rows
    return token_scores(
        hidden.squeeze(1).detach(),
        model.head_weight(),
        rows,
        given.batch.labels[0, rows],
        tp_group=given.context.tp_group,
        logits_cap=model.shape.logits_cap,
        vocab_size=vocab_size or model.shape.vocab_size,
        sequence_parallel=given.stage.student.config.sequence_parallel,
    ).label


def coefficient_loss(
    given: LossInput,
    coefficients: Tensor,  # [n] of the loss rows, of any sign
    scale: Tensor,  # 0-dim, see `Term.loss`
    vocab_size: int | None = None,  # see `student_logp`
) -> Tensor:
    """Return -sum of c ln p over the loss rows, 0-dim with the graph of the student."""
    weights = given.batch.loss_mask.new_zeros(given.batch.loss_mask.shape[1])
    weights[given.batch.loss_rows] = coefficients.to(weights.dtype)
    return head_pass(given, weights, scale, vocab_size=vocab_size, kd_ratio=0.0).loss
