"""Row losses of logits: statistics, one all-gather, row values; and the gradient. Chooses Triton on GPUs."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses import torch_rows
from mkd.losses.kd_objective import KDObjective, VocabShard
from mkd.losses.statistics import MergedStatistics, add_terms, gather_statistics


def passes_for(logits: Tensor) -> ModuleType:
    """The module whose `local_statistics`, `merge_statistics`, `divergence_terms` and `write_gradient` run on these logits."""
    if use_triton(logits):
        from mkd.losses import triton_rows

        return triton_rows
    return torch_rows


def use_triton(logits: Tensor) -> bool:
    """Whether Triton kernels run on these logits; their arithmetic is fp32."""
    return logits.is_cuda and logits.dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def row_losses(
    student: Tensor,  # [n, w], this shard's logits
    teacher: Tensor | None,  # [n, w]; None when the objective has no teacher
    labels: Tensor,  # [n] int64
    loss_mask: Tensor,  # [n] compute dtype
    shard: VocabShard,
    objective: KDObjective,
    tp_group: dist.ProcessGroup | None,
) -> MergedStatistics:
    """Row values of the whole vocabulary.

    Communication: one all-gather over the tensor-parallel group; for a divergence that needs a second pass also one
    all-reduce SUM of [2, n]. No backward.
    """
    passes = passes_for(student)
    local = passes.local_statistics(student, teacher, labels, loss_mask, shard, objective)
    merged = passes.merge_statistics(gather_statistics(local, tp_group), shard, objective)
    if objective.uses_teacher and objective.rule.needs_terms:
        terms = passes.divergence_terms(student, teacher, loss_mask, merged, shard, objective)
        if tp_group is not None and dist.get_world_size(tp_group) > 1 and terms.shape[1]:
            dist.all_reduce(terms, group=tp_group)
        merged = add_terms(merged, terms, objective)
    return merged
