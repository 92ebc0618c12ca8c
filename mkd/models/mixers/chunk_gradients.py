"""One step of the gated delta rule's backward in torch, where Triton compiles fla's kernel wrongly.

On Hopper GPUs, Triton from 3.4 to before 3.7.1 gives wrong gradients of keys in `chunk_bwd_dqkwg`, so fla
refuses to run it (https://github.com/fla-org/flash-linear-attention/issues/640). mkd registers this form by
fla's own means for other backends. All other steps stay fla's.

A chunk has C tokens of one document. With G the sum of g from the start of the chunk, in logarithms to base
2, S the state before the chunk and dS the gradient of the state behind it, the step's outputs are

    o_i  = scale (2^G_i q_i S + sum_j<=i 2^(G_i - G_j) (q_i k_j) v_j)      of which do is given
    S'   = 2^G_last S + sum_j 2^(G_last - G_j) k_j v_j^T                   of which dS is given
    v    = u - w S                                                        of which dv is given

and the function returns the gradients of q, k, w and of the sums as natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def chunk_gradients(
    q: Tensor,  # [1, t, key heads, dk]
    k: Tensor,  # [1, t, key heads, dk]
    v: Tensor,  # [1, t, heads, dv], what the tokens write
    do: Tensor,  # [1, t, heads, dv]
    h: Tensor,  # [1, chunks, heads, dk, dv], states before the chunks
    dh: Tensor,  # [1, chunks, heads, dk, dv], gradients of the states behind them
    g: Tensor,  # [1, t, heads] fp32, sums of log2 of decays inside chunks
    dv: Tensor,  # [1, t, heads, dv]
    scale: float,
    cu_seqlens: Tensor,  # [documents + 1] int64
    chunk_indices: Tensor,  # [chunks, 2] int64, document and number of each; some lie behind its end
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q and k, of w [1, t, heads, dk], and of the sums of decays [1, t, heads]."""
    rows = _ChunkRows.of(cu_seqlens, chunk_indices, chunk_size, q.size(1))
    each = v.size(2) // q.size(2)
    q, k = (rows.chunks(x, each) for x in (q, k))  # [n, heads, C, dk]
    v, do, dv = (rows.chunks(x) for x in (v, do, dv))  # [n, heads, C, dv]
    g = rows.chunks(g[..., None])[..., 0]  # [n, heads, C]
    h, dh = h[0], dh[0]
    last = g.gather(-1, rows.last[:, None, None].expand(-1, g.size(1), 1))  # [n, heads, 1]
    pairs = (g[..., :, None] - g[..., None, :]).masked_fill(~rows.pairs[:, None], -torch.inf).exp2() * scale
    ds = (_product(do, v.mT) * pairs).to(q.dtype)
    leaving = (last - g).exp2()
    from_state = _product(h.flatten(-2)[..., None, :], dh.flatten(-2)[..., None])[..., 0] * last.exp2()
    dq = _product(do, h.mT) * (g.exp2() * scale)[..., None]
    dk = _product(v, dh.mT) * leaving[..., None]
    of_rows = torch.where(rows.inside[:, None], (dk * k).sum(-1), 0.0)
    dq += _product(ds, k)
    dk += _product(ds.mT, q)
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    dg += torch.where(rows.is_last[:, None], from_state + of_rows.sum(-1, keepdim=True), 0.0)
    dw = -(dv @ h.mT)
    if each > 1:
        dq, dk = (x.unflatten(1, (-1, each)).sum(2) for x in (dq, dk))
    dq, dk = dq.to(q.dtype), dk.to(k.dtype)
    return rows.tokens(dq), rows.tokens(dk), rows.tokens(dw), rows.tokens(dg[..., None])[..., 0]


@dataclass(frozen=True)
class _ChunkRows:
    """The rows of n chunks of C tokens. A chunk may have fewer tokens; row 0 is read in place of others."""

    rows: Tensor  # [n, C] int64
    inside: Tensor  # [n, C] bool, True for tokens
    pairs: Tensor  # [n, C, C] bool, True where token j is not behind token i
    last: Tensor  # [n] int64, place of the last token
    slots: Tensor  # [t] int64, place of every token among the n C rows

    @classmethod
    def of(cls, cu_seqlens: Tensor, chunk_indices: Tensor, size: int, tokens: int) -> _ChunkRows:
        document, number = chunk_indices.unbind(1)
        place = torch.arange(size, device=cu_seqlens.device)
        offset = number[:, None] * size + place
        inside = offset < (cu_seqlens[document + 1] - cu_seqlens[document])[:, None]
        rows = torch.where(inside, cu_seqlens[document][:, None] + offset, 0)
        pairs = (place[:, None] >= place) & inside[:, :, None]
        slots = rows.new_empty(tokens + 1)  # the last one takes what is not a token
        slots[torch.where(inside, rows, tokens).flatten()] = torch.arange(rows.numel(), device=rows.device)
        return cls(rows, inside, pairs, (inside.sum(1) - 1).clamp(min=0), slots[:-1])

    @property
    def is_last(self) -> Tensor:
        """[n, C] bool, True for the last token of each chunk."""
        places = torch.arange(self.rows.size(1), device=self.rows.device)
        return self.inside & (places == self.last[:, None])

    def chunks(self, x: Tensor, each: int = 1) -> Tensor:
        """Return [1, t, heads, d] as [n, heads * each, C, d]; `each` head occurs so many times."""
        heads = torch.arange(x.size(2) * each, device=x.device) // each
        return x[0][self.rows[:, None, :], heads[None, :, None]]

    def tokens(self, x: Tensor) -> Tensor:
        """Return [n, heads, C, d] as [1, t, heads, d]."""
        size = self.rows.size(1)
        heads, chunk, place = torch.arange(x.size(1), device=x.device), self.slots // size, self.slots % size
        return x[chunk[:, None], heads, place[:, None]][None]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with the precision of its sums: fp32 for halves."""
    if a.dtype not in HALVES:
        return a @ b
    if not a.is_cuda:
        return a.float() @ b.float()
    flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return flat.unflatten(0, a.shape[:2])


def register_where_triton_is_wrong() -> None:
    """Let fla use `chunk_gradients` where it would refuse to run its own kernel, and TileLang is missing."""
    from fla.backends import BaseBackend, register
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1:
        return

    class TorchGradients(BaseBackend):
        backend_type = "mkd"
        priority = 9  # fla's TileLang form comes first

        def chunk_bwd_dqkwg_verifier(self, *args: Any, **options: Any) -> tuple[bool, str | None]:
            has_all = all(options.get(name) is not None for name in ("g", "w", "dv", "cu_seqlens"))
            return has_all and not options.get("state_v_first"), "mkd has the gated delta rule with packs"

        def chunk_bwd_dqkwg(self, w: Tensor, state_v_first: bool = False, **inputs: Any) -> Any:
            dq, dk, dw, dg = chunk_gradients(**inputs)
            return dq, dk, dw, dg

    register("common")(TorchGradients)
