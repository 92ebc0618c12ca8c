"""Measure whether gradients of Transformer Engine's attention are right on this machine.

Its kernels are those of cuDNN, and some versions return wrong gradients: finite ones that are a fifth off, or
NaN. With cuDNN 9.14 on Hopper that happens to all heads of more than 128 channels in packs
(docs/decisions/2026-11-27-attention-check.md; https://github.com/NVIDIA/TransformerEngine/issues/2186).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape

LENGTHS = (257, 64, 383, 320)  # tokens of the documents of a pack: kernels have tiles of 64 and 128
TOLERANCE = 0.03  # of a norm; right kernels in bf16 have 0.003
LOG = logging.getLogger("mkd")

CoreAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [t, heads, d], keys [t, groups, d], values [t, groups, v]) -> [t, heads * v], of documents."""


@dataclass(frozen=True)
class AttentionKind:
    """Sizes of an attention layer on one rank."""

    heads: int
    groups: int  # key/value heads
    channels: int  # of a query and of a key
    value_channels: int
    window: int | None = None  # tokens that a query sees, itself included; None: all earlier ones


def attention_kinds(shape: ModelShape, tp_size: int) -> Iterator[AttentionKind]:
    """Yield the different kinds of attention that Transformer Engine computes in this model."""
    groups = shape.padded_query_groups(tp_size) // tp_size
    heads = groups * (shape.num_attention_heads // shape.num_query_groups)
    found = set[AttentionKind]()
    for layer in shape.layers:
        if (
            not layer.has_attention
            or layer.attention_sinks
            or layer.heads is not None
            and layer.heads.is_wide
        ):
            continue
        window = layer.sliding_window
        if layer.mla is not None:
            own = -(-shape.num_attention_heads // tp_size)
            found.add(AttentionKind(own, own, layer.mla.qk_head_dim, layer.mla.v_head_dim, window))
        elif layer.heads is not None:
            own, size = -(-layer.heads.num_query_groups // tp_size), layer.heads.head_dim
            found.add(AttentionKind(own * layer.heads.heads_per_group, own, size, size, window))
        else:
            found.add(AttentionKind(heads, groups, shape.head_dim, shape.head_dim, window))
    yield from sorted(found, key=str)


def attention_error(core: CoreAttention, kind: AttentionKind, device: torch.device) -> float:
    """Return the largest relative error of output and gradients of `core` in bf16, infinite if not finite.

    The second of two calls finds memory that is not zero. The reference is plain torch in float64.
    """
    generator = torch.Generator(device).manual_seed(3)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(torch.bfloat16).requires_grad_()

    tokens, worst = sum(LENGTHS), 0.0
    for _ in range(2):
        inputs = (
            drawn(tokens, kind.heads, kind.channels),
            drawn(tokens, kind.groups, kind.channels),
            drawn(tokens, kind.groups, kind.value_channels),
        )
        weights = drawn(tokens, kind.heads * kind.value_channels).detach()
        output = core(*inputs)
        ours = [output.detach(), *torch.autograd.grad(output, inputs, weights)]
        exact = _reference(inputs, weights, kind)
        for found, expected in zip(ours, exact, strict=True):
            error = (found.reshape(expected.shape).double() - expected).norm() / expected.norm()
            worst = max(worst, float(error) if error.isfinite() else float("inf"))
        poison = torch.full((2**24,), torch.nan, device=device)
        del poison  # whatever is allocated next is not zero
    return worst


def _reference(inputs: tuple[Tensor, ...], weights: Tensor, kind: AttentionKind) -> list[Tensor]:
    """Return output and gradients of the attention of each document, [t, ...] float64."""
    wide = [one.detach().double().requires_grad_() for one in inputs]
    outputs = []
    for first, last in pairwise((0, *accumulate(LENGTHS))):
        query, key, value = (one[first:last].transpose(0, 1) for one in wide)
        key, value = (one.repeat_interleave(kind.heads // kind.groups, dim=0) for one in (key, value))
        places = torch.arange(last - first, device=query.device)
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (kind.window or last))
        scores = (query @ key.mT / kind.channels**0.5).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
    output = torch.cat(outputs)
    return [output.detach(), *torch.autograd.grad(output, wide, weights.double())]


def transformer_engine_attention(kind: AttentionKind, device: torch.device) -> CoreAttention:
    """Return Transformer Engine's attention of packs, as Megatron's layers call it."""
    from transformer_engine.pytorch import DotProductAttention

    channels = kind.channels if kind.channels == kind.value_channels else (kind.channels, kind.value_channels)
    module = DotProductAttention(
        kind.heads,
        channels,
        num_gqa_groups=kind.groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(-1, 0) if kind.window is None else (kind.window - 1, 0),
    )
    borders = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).to(device, torch.int32)
    places = dict(cu_seqlens_q=borders, cu_seqlens_kv=borders)
    longest = dict(max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    return lambda query, key, value: module(query, key, value, **places, **longest)


def agreed_own_attention(shape: ModelShape, context: ParallelContext, dtype: torch.dtype) -> bool:
    """Return True if the model must be trained with mkd's own attention, and say so once.

    Collective: all-reduce MAX over all ranks, since with context parallelism the two communicate differently.
    """
    if not (context.platform.is_cuda and context.platform.transformer_engine) or dtype == torch.float32:
        return False
    errors = {
        kind: attention_error(transformer_engine_attention(kind, context.device), kind, context.device)
        for kind in attention_kinds(shape, context.tp_size)
    }
    worst = torch.tensor(max(errors.values(), default=0.0), device=context.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst <= TOLERANCE:
        return False
    if context.rank == 0:
        LOG.warning(
            "gradients of Transformer Engine's attention are wrong on this machine (cuDNN %s): off by %.2g "
            "for heads of %s channels. The student is trained with mkd's own attention, which is slower and "
            "runs without CUDA graphs. A cuDNN of 9.18 or later is said to be right",
            cudnn_version(),
            worst.item(),
            " and ".join(str(size) for size in sorted({kind.channels for kind in errors})),
        )
    return True


def cudnn_version() -> str:
    """Return the version of the cuDNN that Transformer Engine has loaded."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    return ".".join(str(one) for one in get_cudnn_version())
