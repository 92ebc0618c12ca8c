"""A model's scores of given tokens: log-probability, entropy and highest probability of each prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.lm_head import head_logits, whole_sequence
from mkd.losses.softmax import compute_dtype
from mkd.parallel.axes import place_in
from mkd.plan.footprint.head import SCORED_LOGIT_BYTES, head_block_rows


@dataclass(frozen=True)
class TokenScores:
    """Scores of n predictions, at T = 1, in nats, fp32 (fp64 for fp64 hidden states).

    They are the same bits on every tensor-parallel rank.
    """

    label: Tensor  # [n] ln p(label)
    entropy: Tensor  # [n]
    highest: Tensor  # [n] ln of the highest probability


@torch.no_grad()
def token_scores(
    hidden: Tensor,  # [t, h] final hidden states; [t/tp, h] with sequence_parallel
    weight: Tensor,  # [w, h] this rank's rows of the LM head
    rows: Tensor,  # [n] int64, positions of `hidden`, or of the result of `exchange`; positions may repeat
    labels: Tensor,  # [n] int64, rank * w + column: global vocabulary ids where the head is split in order
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    logits_cap: float | None,  # see `softcap`
    vocab_size: int | None = None,  # number of real columns, the first ones of all ranks ...
    real: Tensor | None = None,  # ... or [w] bool: the real columns of this rank
    sequence_parallel: bool = False,
    exchange: Callable[[Tensor], Tensor] | None = None,  # [t, h] -> [t', h], with rows of other CP ranks
) -> TokenScores:
    """Score tokens from hidden states x a vocabulary-parallel LM head, block by block.

    Logits are made in fp32 also from bf16 hidden states: rounding them to bf16 would move a log-probability
    by 1e-2. Communication over the tensor-parallel group: per block one all-reduce MAX of [n] and one
    all-reduce SUM of [3, n]; with `sequence_parallel` an all-gather of the hidden states. No backward.
    """
    if sequence_parallel:
        hidden = whole_sequence(hidden, tp_group, sequence_parallel)
    if exchange is not None:
        hidden = exchange(hidden)
    width = weight.shape[0]
    first = width * place_in(tp_group)[0]
    if real is None:
        real = torch.arange(first, first + width, device=weight.device) < vocab_size
    size = head_block_rows(len(rows), width, SCORED_LOGIT_BYTES, weight.is_cuda)
    parts = []
    for start in range(0, max(len(rows), 1), size):
        block = slice(start, start + size)
        logits = head_logits(hidden[rows[block]], weight, compute_dtype(hidden), logits_cap)
        parts.append(_scores(logits.masked_fill_(~real, -torch.inf), labels[block] - first, tp_group))
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _scores(
    logits: Tensor, columns: Tensor, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ln p(label), entropy, ln of the highest p) of logits [n, w], which are overwritten.

    `columns` [n] are the labels' columns, outside [0, w) if on another rank.
    """
    is_split = place_in(tp_group)[1] > 1
    highest = logits.amax(dim=1)
    if is_split:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp_group)
    logits.sub_(highest[:, None])
    is_own = (columns >= 0) & (columns < logits.shape[1])
    label = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    exponentials = logits.exp()
    products = logits.masked_fill_(exponentials == 0, 0.0).mul_(exponentials)  # 0 ln 0 = 0
    sums = torch.stack([exponentials.sum(dim=1), products.sum(dim=1), torch.where(is_own, label, 0.0)])
    if is_split:
        dist.all_reduce(sums, group=tp_group)
    total, mean, label = sums
    log_total = total.log()
    return label - log_total, log_total - mean / total, -log_total
