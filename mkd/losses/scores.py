"""Log-probabilities of given tokens: hidden states x a vocabulary-parallel LM head, chunk by chunk."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mkd.losses.objective import KDObjective, VocabShard
from mkd.losses.rows import row_losses
from mkd.plan.head import head_chunk_rows


@torch.no_grad()
def token_log_probabilities(
    hidden: Tensor,  # [t, h] final hidden states; [t/tp, h] with sequence_parallel
    weight: Tensor,  # [w, h] this rank's rows of the padded LM head
    rows: Tensor,  # [n] int64, positions of `hidden`; one may come several times
    labels: Tensor,  # [n] int64, global vocabulary ids
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    vocab_size: int,  # real rows of the padded head
    sequence_parallel: bool = False,
) -> Tensor:  # [n] fp32 (fp64 for fp64 hidden states)
    """ln p(labels[i] | position rows[i]), the same bits on every tensor-parallel rank.

    Logits are made in fp32 also from bf16 hidden states: rounding them to bf16 would move a log-probability by 1e-2.
    Communication over the tensor-parallel group: per chunk one all-gather of row statistics; with `sequence_parallel` an
    all-gather of the hidden states. No backward.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=tp_group)
    settings = dict(kd_ratio=0.0, temperature=1.0, temperature_scaling="none", divergence="forward_kl")
    objective = KDObjective.of(vocab_size, None, **settings, jsd_beta=0.5, mixed_kl_weight=0.5, with_ce_metric=True)
    shard = VocabShard.of_group(weight.shape[0], tp_group, objective)
    size = head_chunk_rows(len(rows), weight.shape[0], 4, weight.is_cuda)
    parts = []
    for first in range(0, max(len(rows), 1), size):
        label = labels[first : first + size]
        logits = _fp32_logits(hidden[rows[first : first + size]], weight)
        merged = row_losses(logits, None, label, logits.new_ones(len(label)), shard, objective, tp_group)
        parts.append(-merged.ce)
    return torch.cat(parts)


def _fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n, h], [w, h] -> [n, w] in fp32 (fp64 from fp64)."""
    if hidden.dtype != torch.bfloat16:
        return torch.mm(hidden, weight.t())
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden.float(), weight.t().float())
