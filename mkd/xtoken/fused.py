"""LM heads and chunk loss in one: slice by slice, so that no [t, v] tensor ever exists.

See losses/fused_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.differentiable_once import differentiable_once
from mkd.losses.lm_head import HeadGradients, HeadInput, head_logits, head_product, whole_sequence
from mkd.losses.softcap import softcap_and_tanh, through_softcap
from mkd.losses.softmax import compute_dtype
from mkd.losses.vocab_parallel import use_triton
from mkd.parallel.exchange import exchange_rows
from mkd.plan.footprint.head import head_block_rows
from mkd.xtoken import chunk_torch_passes
from mkd.xtoken.chains import chains
from mkd.xtoken.chunks import ONE_TO_ONE, ChunkBatch, ChunkSide
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.loss_settings import ChunkLossSettings
from mkd.xtoken.partition import one_to_one
from mkd.xtoken.projected import prefix_kl, projected
from mkd.xtoken.slices import ChunkSlice, slice_ranges
from mkd.xtoken.teacher_metrics import slice_metrics
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary

OWN_LOSSES = {"partition_kl": chains, "prefix_kl": prefix_kl, "p_kl": projected}
DENSE_LOSSES = ("gold", "h_kl", "uld")  # of published systems: they read whole vocabularies


@dataclass(frozen=True)
class ChunkOutput:
    """Sums over the chunks that this rank owns; the same on every tensor-parallel rank.

    0-dim, in the compute dtype (fp64 for fp64 logits, else fp32), counts int64. Only `loss` has a graph.
    Chunks of weight 0 count nowhere.
    """

    loss: Tensor  # sum of weight * s(T) * D
    kd: Tensor  # the same number
    teacher_ce: Tensor  # sum over the chunks' teacher tokens of -ln p_t, T = 1, nats
    teacher_entropy: Tensor  # sum over the same rows, T = 1, nats
    top1_agreement: Tensor  # 1-1 chunks whose first maximum of the teacher, if common, is the student's
    num_chunks: Tensor
    num_one_to_one: Tensor  # denominator of `top1_agreement`
    num_teacher_tokens: Tensor  # denominator of `teacher_ce` and `teacher_entropy`


def fused_chunk_kd(
    student: HeadInput,  # hidden [t, h_s] and weight [w_s, h_s]
    teacher: HeadInput,  # frozen, hidden [t', h_t] and weight [w_t, h_t] in slot order (TeacherSlots)
    chunks: ChunkBatch,  # on the device, the same on every tensor-parallel rank
    *,
    vocabulary: ChunkVocabulary,  # on the device
    settings: ChunkLossSettings,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    cp_group: dist.ProcessGroup | None,  # None: the sequence is not split; then no side has an exchange
    loss_gradient: Tensor | None = None,  # 0-dim, what the caller multiplies `loss` by before backward
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,  # most rows of one model in a slice, unless one chunk has more tokens
    fp32_logits: bool = False,
) -> ChunkOutput:
    """Compute the chunk loss of `hidden @ weight.T` of both models, differentiable by the student's inputs.

    Every rank owns its chunks (`chunks`), and the engine sums over the ranks of context and data parallelism.
    As in `fused_linear_kd` logits exist for one slice of chunks at a time, and loss and gradient are made in
    forward. `loss_gradient` is the factor of `loss` in the caller's backward. If it is given, gradients are
    final, and a weight that has `main_grad` gets its own added there. In evaluation (no_grad) it stops after
    the values. The host never waits for the device.

    Communication over the tensor-parallel group: per slice, the collectives of the loss and one all-gather of
    the metrics; for hidden states as `fused_linear_kd`. Over the context-parallel group: one all-to-all of
    each side that has an exchange, and one for the student in backward. A rank without chunks joins the
    collectives of the hidden states.
    """
    assert student.is_bare and teacher.is_bare, "chunk losses know no bias and no scale"
    assert teacher.weight.shape[0] == vocabulary.teacher_width, "the teacher's head is in slot order"
    assert student.weight.shape[0] == vocabulary.student_width, "the slots were made for this student's head"
    dtype = compute_dtype(student.hidden) if fp32_logits else student.hidden.dtype
    call = LossCall(vocabulary, settings, passes_for(student.hidden, settings), tp_group)
    most_rows = chunk_rows or _most_rows(chunks, call, dtype, student.hidden.is_cuda)
    hidden = _chunk_rows(student.hidden, chunks.student, tp_group, cp_group, sequence_parallel)
    with torch.no_grad():
        teacher_hidden = _chunk_rows(teacher.hidden, chunks.teacher, tp_group, cp_group, sequence_parallel)
    head = _Head(call, chunks, most_rows, dtype, torch.is_grad_enabled(), loss_gradient)
    caps = student.logits_cap, teacher.logits_cap
    loss, sums = _FusedChunkKD.apply(hidden, student.weight, teacher_hidden, teacher.weight, head, caps)
    return ChunkOutput(loss=loss, **sums)


def passes_for(hidden: Tensor, settings: ChunkLossSettings) -> ModuleType:
    """Return the module of passes over these logits: for Triton if it has the divergence, else for torch."""
    if use_triton(hidden, settings.divergence):
        from mkd.xtoken import chunk_triton_passes

        return chunk_triton_passes
    return chunk_torch_passes


def loss_function(loss: str) -> Callable[..., Tensor]:
    """Return the function of a loss. Those of published systems are imported by the runs that use them."""
    if loss not in DENSE_LOSSES:
        return OWN_LOSSES[loss]
    from mkd.xtoken.published import dense_losses

    return dense_losses.uld if loss == "uld" else dense_losses.hybrid


def _chunk_rows(
    hidden: Tensor,
    side: ChunkSide,
    tp_group: dist.ProcessGroup | None,
    cp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> Tensor:
    """Return the hidden states that `side.rows` counts in."""
    hidden = whole_sequence(hidden, tp_group, sequence_parallel)
    if side.exchange is None:
        return hidden
    plan = side.exchange
    return exchange_rows(hidden, plan.send_rows, plan.send_counts, plan.receive_counts, cp_group)


def _most_rows(batch: ChunkBatch, call: LossCall, dtype: torch.dtype, on_gpu: bool) -> int:
    """Return the most rows of a slice.

    partition_kl makes no temporary of a slice's size. The other losses have up to four more tensors of that
    size in the compute dtype at once. The dense losses have tensors of all ranks' columns.
    """
    rows = max(1, len(batch.student.rows), len(batch.teacher.rows))
    ranks = len(call.vocabulary.common) if call.settings.loss in DENSE_LOSSES else 1
    tensors = 1 if call.settings.loss == "partition_kl" else 4 * ranks
    return head_block_rows(rows, tensors * call.vocabulary.teacher_width, dtype.itemsize, on_gpu)


@dataclass(frozen=True)
class _Head:
    """The settings of one call."""

    call: LossCall
    chunks: ChunkBatch
    most_rows: int
    dtype: torch.dtype
    with_gradient: bool
    loss_gradient: Tensor | None

    def values(self, student: Tensor, teacher: Tensor, piece: ChunkSlice, scale: Tensor | None) -> Tensor:
        """Return values [c] without weights; with `scale` overwrite the student's logits (see `chains`)."""
        loss = self.call.settings.loss
        if loss == "partition_kl" and piece.kind == ONE_TO_ONE:
            return one_to_one(student, teacher, scale, self.call)
        return loss_function(loss)(student, teacher, scale, piece, self.call)

    def scale(self, weights: Tensor) -> Tensor | None:
        """Return d(loss) / d(value) / T, [c]: a gradient by z / T becomes one by z. None in evaluation."""
        if not self.with_gradient:
            return None
        scale = weights * (self.call.settings.scale / self.call.settings.temperature)
        return scale if self.loss_gradient is None else scale * self.loss_gradient


class _FusedChunkKD(torch.autograd.Function):
    """([n, h_s], [w_s, h_s], [m, h_t], [w_t, h_t], _Head) -> (loss, other fields of `ChunkOutput`)."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, head, caps):
        gradients = None
        if head.with_gradient:
            gradients = HeadGradients(hidden, weight, True, head.loss_gradient is not None)
        sums = _no_sums(hidden)
        for chunks in slice_ranges(head.chunks, head.most_rows):
            piece = ChunkSlice.of(head.chunks, chunks, head.call.vocabulary)
            own = hidden[piece.student.hidden_rows]
            student, tanh = softcap_and_tanh(head_product(own, weight, head.dtype), caps[0])
            of_teacher = teacher_hidden[piece.teacher.hidden_rows]
            teacher = head_logits(of_teacher, teacher_weight, head.dtype, caps[1])
            weights = piece.weights.to(compute_dtype(student))
            counts = weights != 0
            metrics = slice_metrics(student, teacher, counts, piece, head.call)
            values = head.values(student, teacher, piece, head.scale(weights))
            metrics["kd"] = head.call.settings.scale * torch.where(counts, weights * values, 0.0).sum()
            sums = {name: total + metrics.get(name, 0) for name, total in sums.items()}
            if gradients is not None:
                gradient = through_softcap(student, tanh).to(hidden.dtype)
                gradients.add(piece.student.hidden_rows, own, gradient)
                del gradient
            del student, tanh, teacher  # before the next slice's logits are made
        ctx.gradients, ctx.loss_gradient = gradients, head.loss_gradient
        return sums["kd"].clone(), sums

    @staticmethod
    @differentiable_once
    def backward(ctx, loss_gradient, _):
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients were made in forward, for one backward"
        hidden, weight, _ = gradients.finish(loss_gradient, ctx.loss_gradient)
        return hidden, weight, None, None, None, None


def _no_sums(hidden: Tensor) -> dict[str, Tensor]:
    """Return zeros for the fields of `ChunkOutput` except the loss."""
    number, count = (hidden.new_zeros((), dtype=dtype) for dtype in (compute_dtype(hidden), torch.int64))
    names = [field.name for field in fields(ChunkOutput) if field.name != "loss"]
    return {name: count if name.startswith("num_") else number for name in names}
