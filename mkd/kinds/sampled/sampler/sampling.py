"""Sample the next token of each row from logits that are split over the vocabulary.

The token is the inverse of the cumulative distribution at a uniform number. That number depends on the seed,
the iteration, the prompt, the completion and the position alone. So every layout samples the same tokens, up
to the rounding of logits, and there is no generator state to save.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.order import mixed
from mkd.parallel.axes import place_in

BLOCK = 256  # columns that are added up together before a token is looked for
ONE = np.float64(2.0**-53)  # step between the uniform numbers
BELOW = 1.0 - 2.0**-52  # factor that keeps a target below the total, whatever was rounded


class Sampled(NamedTuple):
    """The next token of each row, equal on all tensor-parallel ranks."""

    ids: Tensor  # [n] int64
    logp: Tensor  # [n] fp64, ln p(id) at T = 1 over all real ids, nats
    entropy: Tensor  # [n] fp64, at T = 1, nats


def uniforms(
    seed: int,
    iteration: int,
    prompts: np.ndarray,  # [n] int64
    samples: np.ndarray,  # [n] int64
    positions: np.ndarray,  # [n] int64, in the completion
) -> np.ndarray:
    """Return a number in [0, 1) for every token, float64 [n]: a hash of all arguments."""
    with np.errstate(over="ignore"):
        state = np.zeros(len(prompts), dtype=np.uint64)
        for part in (seed, iteration, prompts, samples, positions):
            state = mixed(state + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * ONE


@torch.no_grad()
def sample_tokens(
    logits: Tensor,  # [n, v/tp] fp32 or fp64, this rank's columns
    uniform: Tensor,  # [n] fp64, in [0, 1)
    *,
    temperature: float,  # 0: the most probable id, the first one of several
    vocab_size: int,  # real ids, the first columns of all ranks together
    barred: Tensor | None = None,  # [v/tp] bool, of this rank's columns: real ids that are never sampled
    top_p: float = 1.0,  # sample among the fewest most probable ids that have this probability together
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
) -> Sampled:
    """Sample one token of each row. Probabilities are added up in fp64.

    Communication over the tensor-parallel group: an all-reduce MAX of [2, n], an all-gather of [4, n] and an
    all-reduce SUM of [2, n]; with `top_p` also an all-gather of [n, v/tp]. No backward.
    """
    rank, size = place_in(tp_group)
    rows, width = logits.shape
    first = rank * width
    real = torch.arange(first, first + width, device=logits.device) < vocab_size
    logits = logits.masked_fill(~real, -torch.inf)
    own_highest, own_top = (logits if barred is None else logits.masked_fill(barred, -torch.inf)).max(dim=1)
    highest = torch.stack([own_highest if barred is None else logits.amax(dim=1), own_highest])
    if size > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp_group)
    centred = logits - highest[0][:, None]
    weights, total, mean = _sums_at_1(centred)
    if temperature not in (0.0, 1.0) or barred is not None:  # what can be drawn must not underflow
        weights = ((logits - highest[1][:, None]) / (temperature or 1.0)).exp()
    if barred is not None:
        weights = weights.masked_fill(barred, 0.0)
    if top_p < 1.0 and temperature != 0.0:
        weights = weights * _nucleus(weights, top_p, tp_group)
    blocks = _blocks(weights).sum(dim=2, dtype=torch.float64)  # [n, blocks]
    is_top = (own_highest == highest[1]).double()
    parts = _gathered(torch.stack([total, mean, blocks.sum(dim=1), is_top]), tp_group, size)  # [tp, 4, n]
    log_total = parts[:, 0].sum(dim=0).log()
    entropy = log_total - parts[:, 1].sum(dim=0) / parts[:, 0].sum(dim=0)
    if temperature == 0.0:
        is_own, column = parts[:, 3].argmax(dim=0) == rank, own_top
    else:
        is_own, column = _inverse_cdf(uniform, weights, blocks, parts[:, 2], rank)
    logp = centred.gather(1, column[:, None])[:, 0].double() - log_total
    found = torch.where(is_own, torch.stack([(column + first).double(), logp]), 0.0)
    if size > 1:
        dist.all_reduce(found, group=tp_group)
    return Sampled(found[0].long(), found[1], entropy)


def barred_columns(
    unused_ids: Collection[int], width: int, tp_group: dist.ProcessGroup | None, device: torch.device
) -> Tensor | None:
    """Return which of this rank's `width` columns are among the ids, bool [width]; None without any id."""
    if not unused_ids:
        return None
    first = width * place_in(tp_group)[0]
    return torch.isin(torch.arange(first, first + width), torch.tensor(sorted(unused_ids))).to(device)


def _sums_at_1(centred: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(x) [n, w], and the sums of exp(x) and of x exp(x), fp64 [n] each."""
    weights = centred.exp()
    products = torch.where(weights == 0, 0.0, centred) * weights  # 0 ln 0 = 0
    return weights, weights.sum(dim=1, dtype=torch.float64), products.sum(dim=1, dtype=torch.float64)


def _blocks(weights: Tensor) -> Tensor:
    """Return the columns in blocks, [n, blocks, BLOCK], zeros behind the last one."""
    missing = -weights.shape[1] % BLOCK
    return torch.nn.functional.pad(weights, (0, missing)).unflatten(1, (-1, BLOCK))


def _gathered(values: Tensor, tp_group: dist.ProcessGroup | None, size: int) -> Tensor:
    if size == 1:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(parts, values, group=tp_group)
    return torch.stack(parts)


def _inverse_cdf(
    uniform: Tensor,  # [n]
    weights: Tensor,  # [n, w], not normalised
    blocks: Tensor,  # [n, blocks] fp64, their sums
    ranks: Tensor,  # [tp, n] fp64, their sums on every rank
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Return (True where this rank has the sampled column, the column), bool and int64 [n]."""
    owner, within = _place(uniform.to(ranks.device) * ranks.sum(dim=0), ranks.t())
    block, within = _place(within, blocks)
    inner = _blocks(weights).gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double()
    column, _ = _place(within, inner)
    # If all columns of this rank have weight 0, the place may be in the zeros behind the last column. Another
    # rank has the token then.
    return owner == rank, (block * BLOCK + column).clamp(max=weights.shape[1] - 1)


def _nucleus(weights: Tensor, top_p: float, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Return 1 for the columns [n, w] of this rank that are among the most probable ones, else 0.

    They are the fewest of all ranks that have at least the part `top_p` of all weights. Of equal weights, the
    first ones are among them.
    """
    rank, size = place_in(tp_group)
    rows, width = weights.shape
    whole = _gathered(weights, tp_group, size).transpose(0, 1).reshape(rows, size * width)
    ordered, columns = whole.sort(dim=1, descending=True, stable=True)
    sums = _blocks(ordered).sum(dim=2, dtype=torch.float64)
    target = torch.full((rows,), top_p, dtype=torch.float64, device=weights.device)
    _, last = _inverse_cdf(target, ordered, sums, sums.sum(dim=1)[None], rank=0)
    is_kept = torch.arange(size * width, device=weights.device) <= last[:, None]
    kept = torch.zeros_like(whole).scatter_(1, columns, is_kept.to(whole.dtype))
    return kept[:, rank * width : (rank + 1) * width]


def _place(target: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return (first place where the running sum of `sums` [n, m] exceeds `target`, the rest of it), [n] each.

    Products with a triangular matrix take the place of `cumsum`, which is not deterministic on GPUs.
    """
    size = sums.shape[1]
    upper = torch.ones(size, size, dtype=sums.dtype, device=sums.device).triu()
    ends = sums @ upper
    target = torch.minimum(target.clamp(min=0), ends[:, -1] * BELOW)
    place = (ends <= target[:, None]).sum(dim=1).clamp(max=size - 1)
    begin = (ends - sums).gather(1, place[:, None])[:, 0]
    return place, target - begin
