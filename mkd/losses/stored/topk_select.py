"""The most probable ids of a model whose vocabulary is split across tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.kd_objective import shard_start
from mkd.losses.softmax import LOWEST, Normaliser, ShardSoftmax, real_columns
from mkd.losses.statistics import gather_statistics
from mkd.losses.torch_rows import row_blocks
from mkd.parallel.axes import place_in


@dataclass(frozen=True)
class TopK:
    """The most probable ids of n predictions; the same on every tensor-parallel rank."""

    ids: Tensor  # [n, k] int64, most probable first
    logprobs: Tensor  # [n, k] compute dtype, at `temperature`
    ce: Tensor  # [n] cross entropy at T = 1, nats; inf for a label beyond the vocabulary
    entropy: Tensor  # [n] entropy at T = 1, nats


@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor,  # [n, w] bf16/fp32/fp64, this rank's columns of the padded vocabulary
    labels: Tensor,  # [n] int64, global vocabulary ids
    k: int,
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    vocab_size: int,  # ids that count; those beyond have no probability
    temperature: float = 1.0,
) -> TopK:
    """Return the top k of the first `vocab_size` ids, by two all-gathers over TP for each block of rows."""
    assert 0 < k <= vocab_size
    rank, size = place_in(tp_group)
    width = logits.shape[1]
    start = shard_start(width, rank, size)
    count = min(max(vocab_size - start, 0), width)
    blocks = []
    for rows in row_blocks(logits):
        columns = real_columns(logits[rows], count)
        values, ids = _local_topk(columns, k, start)
        plain = _statistics(columns, labels[rows] - start, count, temperature)
        gathered = gather_statistics(torch.cat([plain, values]), tp_group)
        blocks.append(_merge(gathered, gather_statistics(ids, tp_group), temperature))
    return TopK(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _local_topk(columns: Tensor, k: int, start: int) -> tuple[Tensor, Tensor]:
    """Return logits [k, n] and global ids [k, n] of the largest columns; LOWEST if there are fewer than k."""
    values, ids = columns.topk(min(k, columns.shape[1]), dim=1)
    padding = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, padding, value=LOWEST)
    return values.t().contiguous(), torch.nn.functional.pad(ids + start, padding).t().contiguous()


def _statistics(columns: Tensor, index: Tensor, count: int, temperature: float) -> Tensor:
    """Return [5, n]: maximum, sums at T and 1, mean of centred logits at T = 1, logit of `index` or -inf."""
    plain = ShardSoftmax.of(columns, 1.0)
    mean = plain.centred().mul_(plain.probabilities).sum(dim=1)
    own = (index >= 0) & (index < count)
    label = columns.gather(1, index.masked_fill(~own, 0)[:, None]).squeeze(1).masked_fill(~own, float("-inf"))
    return torch.stack([plain.maximum, ShardSoftmax.of(columns, temperature).total, plain.total, mean, label])


def _merge(gathered: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `TopK` for one block of rows, from [tp, 5 + k, n] and [tp, k, n]."""
    maxima, sums, plain_sums, means, label = gathered[:, :5].unbind(dim=1)
    softmax, plain = Normaliser.merge(maxima, sums, temperature), Normaliser.merge(maxima, plain_sums, 1.0)
    k = ids.shape[1]
    values, places = gathered[:, 5:].flatten(0, 1).t().topk(k, dim=1)
    chosen = ids.flatten(0, 1).t().gather(1, places)
    logprobs = (values - softmax.maximum[:, None]) / temperature - softmax.log_sum[:, None]
    ce = plain.log_sum - (label.amax(dim=0) - plain.maximum)
    return chosen, logprobs, ce, plain.log_sum - plain.mean_centred(means)
