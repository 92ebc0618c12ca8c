"""Cross entropy + distillation on logits that are split over the vocabulary.

Communication: forward, one all-gather of [k, n] row statistics over the tensor-parallel group (k <= 12, n rows);
backward, none. The loss is replicated: each rank's backward gives the gradient of its own columns, with no factor of
the group's size. Nothing waits for the device.

Memory: both logits are kept until backward (the teacher's too: they are the target). Temporaries are a few row chunks,
never a [n, w] tensor in the compute dtype. Chunks are looped over inside one autograd node: under autograd every
slice's backward would rebuild a full-size gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.errors import UsageError
from mkd.losses.objective import KDObjective, KDOutput, VocabShard
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import MergedStatistics, gradient, local_statistics, merge_statistics

# Size of one row chunk in the compute dtype: on a CPU its few temporaries stay in cache; on an accelerator it is large
# enough to hide the launches and small against the logits themselves.
CPU_CHUNK_BYTES = 2 * 2**20
ACCELERATOR_CHUNK_BYTES = 256 * 2**20


def vocab_parallel_kd(
    student_logits: Tensor,  # [..., w] bf16/fp32/fp64, this rank's columns of the padded vocabulary
    teacher_logits: Tensor | None,  # [..., w], same shape and columns, frozen; not read when kd_ratio is 0
    labels: Tensor,  # [...] int64, global vocabulary ids; any value where the mask is 0
    loss_mask: Tensor,  # [...] float or bool, weight of each row; 0 = no loss
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    student_vocab_size: int,
    teacher_vocab_size: int | None = None,
    kd_ratio: float = 0.5,
    temperature: float = 1.0,
    temperature_scaling: str = "squared",
    divergence: str = "forward_kl",
    with_ce_metric: bool = False,
    overwrite_student_logits: bool = False,
) -> KDOutput:
    """Sum over rows of `mask * [(1 - r) CE + r s(T) KD]`, differentiable by the student's logits, and metric sums.

    CE is over the student's real ids at T = 1. KD is over the ids that both models have, the first
    `min(student_vocab_size, teacher_vocab_size)`, both distributions renormalised there. The sizes are REAL rows;
    columns beyond are padding: never read, gradient zero. Both models are padded to one width: an id is on one rank.

    Rows with mask 0 add exactly zero to every sum and to the gradient, whatever their logits and labels hold. Loss rows
    need finite logits; a label that is no real id of the student makes `ce` infinite. With kd_ratio 1 CE is computed
    only if `with_ce_metric`. The caller normalises: multiply `loss` by a 0-dim tensor 1 / (global count).

    The gradient has the student's dtype; `overwrite_student_logits=True` writes it over the logits' storage (where they
    are contiguous), for callers that read them no more. A second backward through that graph then raises.

    Raises UsageError for values that make no loss (see `KDObjective`) or a missing teacher.
    """
    objective = KDObjective(
        kd_ratio=kd_ratio,
        temperature=temperature,
        temperature_scaling=temperature_scaling,
        divergence=divergence,
        with_ce_metric=with_ce_metric,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=student_vocab_size if teacher_vocab_size is None else teacher_vocab_size,
    )
    teacher = _teacher_for(objective, teacher_logits, teacher_vocab_size)
    _check_shapes(student_logits, teacher, labels, loss_mask)
    width = student_logits.shape[-1]
    loss, sums = _VocabParallelKD.apply(
        student_logits.reshape(-1, width),
        None if teacher is None else teacher.reshape(-1, width),
        labels.reshape(-1),
        loss_mask.reshape(-1).to(compute_dtype(student_logits)),
        _shard(width, tp_group, objective),
        objective,
        tp_group,
        overwrite_student_logits,
    )
    return KDOutput(loss=loss, **sums)


def _teacher_for(objective: KDObjective, logits: Tensor | None, vocab_size: int | None) -> Tensor | None:
    if not objective.uses_teacher:
        return None
    if logits is None or vocab_size is None:
        raise UsageError(
            f"kd-ratio is {objective.kd_ratio} but there are no teacher logits, or no teacher vocabulary size",
            "the divergence compares the student with the teacher",
            "give the loss a teacher, or set kd-ratio to 0",
        )
    return logits


def _check_shapes(student: Tensor, teacher: Tensor | None, labels: Tensor, loss_mask: Tensor) -> None:
    rows = student.shape[:-1]
    assert labels.shape == rows, f"labels {tuple(labels.shape)} do not fit student logits {tuple(student.shape)}"
    assert loss_mask.shape == rows, f"loss_mask {tuple(loss_mask.shape)} does not fit {tuple(student.shape)}"
    if teacher is not None:
        assert teacher.shape == student.shape, (
            f"teacher logits {tuple(teacher.shape)} and student logits {tuple(student.shape)} differ: "
            "pad both LM heads to the same vocabulary width"
        )
        assert not teacher.requires_grad, "the teacher is frozen: compute its logits under no_grad"


def _shard(width: int, tp_group: dist.ProcessGroup | None, objective: KDObjective) -> VocabShard:
    rank, size = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
    real = (objective.student_vocab_size, objective.teacher_vocab_size)
    assert all(0 < rows <= width * size for rows in real), f"real vocabularies {real} exceed {width * size} columns"
    return VocabShard.of(width, rank, size, objective)


class _VocabParallelKD(torch.autograd.Function):
    """([n, w], [n, w] | None, [n], [n], ...) -> (loss, other fields of `KDOutput`); chunked over rows inside."""

    @staticmethod
    def forward(ctx, student, teacher, labels, loss_mask, shard, objective, tp_group, overwrite):
        local = [
            local_statistics(student[rows], _rows(teacher, rows), labels[rows], shard, objective)
            for rows in row_chunks(student)
        ]
        merged = merge_statistics(_all_gather(local, tp_group), shard, objective)
        ctx.save_for_backward(student, teacher, labels, loss_mask)
        ctx.merged, ctx.shard, ctx.objective, ctx.overwrite = merged, shard, objective, overwrite
        return _weighted_sums(merged, loss_mask, objective)

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient, _):
        student, teacher, labels, loss_mask = ctx.saved_tensors
        row_weight = loss_mask * loss_gradient
        no_loss = (loss_mask == 0)[:, None]
        result = student.detach() if ctx.overwrite else torch.empty_like(student)
        for rows in row_chunks(student):
            chunk = gradient(
                student[rows],
                _rows(teacher, rows),
                labels[rows],
                ctx.merged.rows(rows),
                row_weight[rows],
                ctx.shard,
                ctx.objective,
            )
            # A weight of zero is not enough: a masked row may hold NaN.
            result[rows, : chunk.shape[1]] = chunk.masked_fill_(no_loss[rows], 0.0)
            result[rows, chunk.shape[1] :] = 0.0
        return result, None, None, None, None, None, None, None


def row_chunks(logits: Tensor) -> list[slice]:
    """Slices that cover the rows of [n, w] (at least one slice), each of about the chunk size of the device."""
    budget = CPU_CHUNK_BYTES if logits.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    height = max(1, budget // (logits.shape[1] * compute_dtype(logits).itemsize))
    return [slice(first, first + height) for first in range(0, max(1, logits.shape[0]), height)]


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _all_gather(local: list[dict[str, Tensor]], tp_group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Statistics of all ranks by name, each [tp, n], from this rank's chunks: all-gather over TP, no backward."""
    names = local[0].keys()
    packed = torch.cat([torch.stack(list(chunk.values())) for chunk in local], dim=1)
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    gathered = packed
    if size > 1:
        gathered = packed.new_empty(size * packed.shape[0], packed.shape[1])
        dist.all_gather_into_tensor(gathered, packed, group=tp_group)
    return dict(zip(names, gathered.view(size, *packed.shape).unbind(dim=1), strict=True))


def _weighted_sums(
    merged: MergedStatistics, loss_mask: Tensor, objective: KDObjective
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and the other fields of `KDOutput`."""
    is_loss_row = loss_mask != 0

    def total(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(is_loss_row, loss_mask * values, 0.0).sum()

    sums = {name: total(getattr(merged, name)) for name in ("ce", "teacher_ce", "teacher_entropy", "top1_agreement")}
    sums["kd"] = None if merged.kd is None else objective.scale * total(merged.kd)
    sums["num_loss_tokens"] = is_loss_row.sum()
    ratio = objective.kd_ratio
    parts = [(1.0 - ratio) * sums["ce"]] if objective.uses_ce else []
    parts += [ratio * sums["kd"]] if objective.uses_teacher else []
    return sum(parts), sums
