"""The passes over logits in plain torch: the definition that the Triton kernels follow; CPUs run them.

Each function works through its rows in blocks that fit the cache, so that no [n, w] tensor in the compute
dtype ever exists. None of them modifies its arguments (except `result` of `write_gradient`). Legend: n rows,
w local columns, k statistics.

The cross-entropy side follows Megatron's `VocabParallelCrossEntropy`: its rule for targets of other shards,
and on shards its `prepare_gradient_calculation_operands` and `calculate_gradients` for softmax minus one-hot.
A vocabulary that is not split takes the same arithmetic without Megatron. Its forward helpers are not called.
`calculate_logits_max` rounds fp64 to fp32. `calculate_predicted_logits` overwrites the logits that the
divergence still reads. In sequence they take a collective each where one is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mkd.losses.kd_objective import KDObjective, LossRows, VocabShard
from mkd.losses.softmax import ShardRows, ShardSoftmax, compute_dtype, real_columns
from mkd.losses.statistics import MergedStatistics, merge_statistics

__all__ = ["divergence_terms", "local_statistics", "merge_statistics", "write_gradient"]

# Size of one block of rows in the compute dtype. On a CPU its few temporaries stay in cache. On an
# accelerator it is large enough to hide the launches and small against the logits themselves.
CPU_BLOCK_BYTES = 2 * 2**20
ACCELERATOR_BLOCK_BYTES = 256 * 2**20
ARGMAX_COLUMNS = 256  # of a block of `first_maximum`


def local_statistics(data: LossRows, shard: VocabShard, objective: KDObjective) -> Tensor:
    """Compute this shard's statistics `objective.statistic_names`, [k, n] in the compute dtype."""
    blocks = []
    for rows in row_blocks(data.student):
        named = _statistics(data.block(rows), shard, objective)
        blocks.append(torch.stack([named[name] for name in objective.statistic_names]))
    return torch.cat(blocks, dim=1)


def divergence_terms(
    data: LossRows, merged: MergedStatistics, shard: VocabShard, objective: KDObjective
) -> Tensor:
    """Compute this shard's part [k, n] of the terms of a divergence that needs both whole softmaxes."""
    blocks = []
    for rows in row_blocks(data.student):
        models = _both_models(data.block(rows), merged.rows(rows), shard, objective)
        blocks.append(objective.divergence.terms(*models))
    terms = torch.cat(blocks, dim=1)
    return terms if shard.shared else torch.zeros_like(terms)


def write_gradient(
    result: Tensor,  # [n, w], may be the student's logits themselves
    data: LossRows,
    row_weight: Tensor,  # [n] compute dtype, derivative of the final scalar by a row's loss
    merged: MergedStatistics,
    shard: VocabShard,
    objective: KDObjective,
) -> None:
    """Write d loss / d student logits into `result`: zero in padding columns and rows of mask 0."""
    no_loss = data.mask == 0
    for rows in row_blocks(data.student):
        block = _gradient(data.block(rows), merged.rows(rows), row_weight[rows], shard, objective)
        # A weight of zero is not enough: a masked row may hold NaN.
        result[rows, : block.shape[1]] = clear_rows(block, no_loss[rows])
        result[rows, block.shape[1] :] = 0.0


def row_blocks(logits: Tensor) -> list[slice]:
    """Return slices, at least one, that cover the rows of [n, w], each of about the block size."""
    budget = CPU_BLOCK_BYTES if logits.device.type == "cpu" else ACCELERATOR_BLOCK_BYTES
    height = max(1, budget // (logits.shape[1] * compute_dtype(logits).itemsize))
    return [slice(first, first + height) for first in range(0, max(1, logits.shape[0]), height)]


def clear_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Set the rows [n] bool of [n, w] fp32 or fp64 to zero in place, whatever they hold; return `tensor`.

    A mask over the bits does not wait for the device, and takes a CPU a twentieth of the time of
    `masked_fill_`.
    """
    bits = torch.int64 if tensor.dtype == torch.float64 else torch.int32
    tensor.view(bits).bitwise_and_(rows.logical_not().to(bits).neg_()[:, None])  # -1 has all bits
    return tensor


def _statistics(data: LossRows, shard: VocabShard, objective: KDObjective) -> dict[str, Tensor]:
    statistics: dict[str, Tensor] = {}
    own = None
    if objective.uses_teacher:
        own = ShardSoftmax.of(real_columns(data.student, shard.shared), objective.temperature)
        teacher = real_columns(data.teacher, shard.shared)
        statistics |= _kd_statistics(own, teacher, data.labels, shard, objective)
    if objective.measures_ce:
        if not objective.ce_reads_kd_softmax:
            own = ShardSoftmax.of(real_columns(data.student, shard.student), 1.0)
            statistics |= {"ce_max": own.maximum, "ce_sum": own.total}
        statistics["ce_label"] = _label_logit(own.logits, data.labels, shard.start, shard.student)
    return statistics


def _kd_statistics(
    student: ShardSoftmax, teacher_logits: Tensor, labels: Tensor, shard: VocabShard, objective: KDObjective
) -> dict[str, Tensor]:
    teacher = ShardSoftmax.of(teacher_logits, objective.temperature)
    plain = teacher if objective.temperature == 1.0 else ShardSoftmax.of(teacher_logits, 1.0)
    top = first_maximum(teacher_logits)
    return {
        "student_max": student.maximum,
        "student_sum": student.total,
        "teacher_max": teacher.maximum,
        "teacher_sum": teacher.total,
        **objective.divergence.cross(student, teacher),
        "plain_sum": plain.total,
        "plain_mean": plain.centred().mul_(plain.probabilities).sum(dim=1),
        "teacher_label": _label_logit(teacher_logits, labels, shard.start, shard.shared),
        "student_at_teacher_top": student.logits.gather(1, top).squeeze(1),
    }


def first_maximum(logits: Tensor) -> Tensor:
    """Return the column of the first maximum of each row [n, c], [n, 1].

    Find the maximum of every block of columns first, then its place in the first block that has it: on a CPU
    argmax takes twenty times as long as amax.
    """
    columns, block = logits.shape[1], ARGMAX_COLUMNS
    if columns <= block:
        return logits.argmax(dim=1, keepdim=True)
    whole = columns // block * block
    largest = [logits[:, :whole].unflatten(1, (-1, block)).amax(dim=2)]
    if whole < columns:
        largest.append(logits[:, whole:].amax(dim=1, keepdim=True))
    start = torch.cat(largest, dim=1).argmax(dim=1, keepdim=True) * block
    # The last block may be short: the columns before it in the window are smaller.
    start.clamp_(max=columns - block)
    window = logits.gather(1, start + torch.arange(block, device=logits.device))
    return start + window.argmax(dim=1, keepdim=True)


def _foreign_labels(labels: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (mask [n] of labels outside [start, start + count), local index [n], 0 where outside)."""
    outside = (labels < start) | (labels >= start + count)
    return outside, (labels - start).masked_fill(outside, 0)


def _label_logit(logits: Tensor, labels: Tensor, start: int, count: int) -> Tensor:
    """Return the label's logit, -inf if another shard owns it: the maximum over ranks finds the owner."""
    outside, index = _foreign_labels(labels, start, count)
    return logits.gather(1, index[:, None]).squeeze(1).masked_fill(outside, float("-inf"))


def _both_models(
    data: LossRows, merged: MergedStatistics, shard: VocabShard, objective: KDObjective
) -> Iterator[ShardRows]:
    """Yield the shared columns of the student and of the teacher."""
    for logits, row in ((data.student, merged.student), (data.teacher, merged.teacher)):
        yield ShardRows(real_columns(logits, shard.shared), objective.temperature, row)


def _gradient(
    data: LossRows, merged: MergedStatistics, row_weight: Tensor, shard: VocabShard, objective: KDObjective
) -> Tensor:
    """Return w [(1-r) (softmax(z_s) - 1[y]) + r s(T)/T dD/da] in the compute dtype; columns beyond it: 0."""
    probabilities = result = None
    if objective.uses_teacher and shard.shared:
        own, target = _both_models(data, merged, shard, objective)
        probabilities = own.probabilities()
        weight = row_weight * (objective.kd_ratio * objective.scale / objective.temperature)
        result = objective.divergence.gradient(own, target, probabilities, merged.residual)
        result.mul_(weight[:, None])
    if objective.uses_ce and shard.student:
        if not objective.ce_reads_kd_softmax:
            columns = real_columns(data.student, shard.student)
            probabilities = ShardRows(columns, 1.0, merged.student_plain).probabilities()
        ce = _ce_gradient(probabilities, data.labels, shard, row_weight * (1.0 - objective.kd_ratio))
        if result is not None:
            ce[:, : shard.shared].add_(result)
        result = ce
    return row_weight.new_zeros(len(row_weight), 0) if result is None else result


def _ce_gradient(probabilities: Tensor, labels: Tensor, shard: VocabShard, weight: Tensor) -> Tensor:
    """Return weight * (softmax - one-hot), written over `probabilities` [n, shard.student]."""
    outside, index = _foreign_labels(labels, shard.start, shard.student)
    if not shard.is_split:
        rows = torch.arange(len(labels), device=labels.device)
        probabilities[rows, index] -= outside.logical_not().to(probabilities.dtype)
        return probabilities.mul_(weight[:, None])
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as helper

    flat, row_index, one_hot, operand = helper.prepare_gradient_calculation_operands(probabilities, outside)
    one_hot = one_hot.to(probabilities.dtype)
    return helper.calculate_gradients(flat, row_index, index, one_hot, operand, weight)
