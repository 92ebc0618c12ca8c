"""The recurrence of a mixer over packed documents, in torch, chunk by chunk.

Each head has a state S [dk, dv], zero at the start of a document. With g <= 0 the log of the decay and beta
the strength of an update, a token computes

    S <- e^g S
    S <- S + k (beta (v - S^T k))^T
    o  = S^T q

This is the gated delta rule. Source: Yang et al. 2024, Gated Delta Networks
(https://arxiv.org/abs/2412.06464); the chunked form is that of Yang et al. 2024, Parallelizing Linear
Transformers with the Delta Rule (https://arxiv.org/abs/2406.06484). Without corrections the second line is
S <- S + k v^T, the recurrence of Mamba-2. Source: Dao and Gu 2024, Transformers are SSMs
(https://arxiv.org/abs/2405.21060).

Chunks cut the row of a pack wherever documents lie, and masks keep documents apart: every shape follows from
the number of tokens. With G the sum of g from the start of a chunk, a pair of tokens i >= j of one document
counts e^(G_i - G_j). A token sees the state before its chunk if its document began before the chunk. What
leaves the chunk belongs to the document of the chunk's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True)
class _Decays:
    """Factors of n chunks of C tokens, for every head; 0 where another document begins."""

    pairs: Tensor  # [n, heads, C, C], from token j to token i >= j
    entering: Tensor  # [n, heads, C, 1], from the state before the chunk to a token
    leaving: Tensor  # [n, heads, C, 1], from a token to the state behind the chunk
    through: Tensor  # [n, heads, 1, 1], from the state before the chunk to the state behind it


def gated_delta_rule(
    q: Tensor,  # [t, heads, dk]; without corrections [t, groups, dk], each for a run of heads
    k: Tensor,  # the same
    v: Tensor,  # [t, heads, dv]
    g: Tensor,  # [t, heads], log of the decay, at most 0
    beta: Tensor | None,  # [t, heads]; None: no corrections
    documents: Tensor,  # [t] int64, ascending
    ends: Sequence[int] = (),  # tokens, each in a document
) -> tuple[Tensor, Tensor]:
    """Return the outputs [t, heads, dv], and the states behind the tokens `ends`, [ends, heads, dk, dv].

    All inputs are fp32 (or fp64), and so are the results.
    """
    tokens, heads = g.shape
    padding = -tokens % CHUNK
    if padding:  # it changes nothing: nothing follows it
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
        g, beta = (x if x is None else F.pad(x, (0, 0, 0, padding)) for x in (g, beta))
        documents = torch.cat((documents, documents[-1:].expand(padding)))
    # [n, heads or groups, C, d]
    q, k, v = (x.unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (q, k, v))
    g = g.unflatten(0, (-1, CHUNK)).transpose(1, 2)  # [n, heads, C]
    decays = _decays(g, documents.view(-1, CHUNK))
    updates, reads = v, None
    if beta is not None:
        beta = beta.unflatten(0, (-1, CHUNK)).transpose(1, 2)
        updates, reads = _updates(k, v, beta[..., None], decays)
    scores = _times(q @ k.transpose(-1, -2), decays.pairs)
    ended = {end // CHUNK for end in ends}
    outputs, kept = _over_chunks(
        _times(q, decays.entering), _times(k, decays.leaving), scores, updates, reads, decays.through, ended
    )
    states = [_state_behind(end, k, decays, *kept[end // CHUNK]) for end in ends]
    outputs = outputs.transpose(1, 2).flatten(0, 1)[:tokens]
    return outputs, torch.stack(states) if states else outputs.new_empty(0, heads, k.size(-1), v.size(-1))


def _times(x: Tensor, of_heads: Tensor) -> Tensor:
    """Return the product of `x` [n, groups, C, *] and `of_heads` [n, heads, C, *], for every head."""
    groups = x.size(1)
    return (x[:, :, None] * of_heads.unflatten(1, (groups, -1))).flatten(1, 2)


def _decays(
    g: Tensor,  # [n, heads, C]
    documents: Tensor,  # [n, C]
) -> _Decays:
    """Return the decays. Sums and differences of g are taken in fp64.

    A sum may reach -1000, where fp32 has a spacing of 6e-5: the relative error of a decay. The gradient of g
    is a difference of such sums too.
    """
    total = g.double().cumsum(-1)
    last = documents[:, -1:]
    before = torch.cat((documents[:1, :1] - 1, last[:-1]))  # the first chunk follows no document
    same = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    pairs = (total[..., :, None] - total[..., None, :]).to(g.dtype).masked_fill(~same, -torch.inf).exp()
    entering = total.to(g.dtype).exp() * (documents == before)[:, None]
    leaving = (total[..., -1:] - total).to(g.dtype).exp() * (documents == last)[:, None]
    through = total[..., -1:].to(g.dtype).exp() * (before == last)[:, None]
    return _Decays(pairs, entering[..., None], leaving[..., None], through[..., None])


def _updates(k: Tensor, v: Tensor, beta: Tensor, decays: _Decays) -> tuple[Tensor, Tensor]:
    """Return what the tokens of a chunk write from a zero state, and how that depends on the state.

    Token i writes beta_i (v_i - what it reads), and it reads what tokens j < i of the chunk have written: a
    triangular system. Shapes: [n, heads, C, dv], and [n, heads, C, dk] for `updates - reads @ state`.
    """
    system = (k * beta) @ k.transpose(-1, -2) * decays.pairs
    right = torch.cat((v * beta, k * beta * decays.entering), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    updates, reads = solved.split((v.size(-1), k.size(-1)), dim=-1)
    return updates, reads


def _over_chunks(
    q: Tensor,  # [n, heads, C, dk], times the decay from the state before the chunk
    k: Tensor,  # [n, heads, C, dk], times the decay to the state behind the chunk
    scores: Tensor,  # [n, heads, C, C], of queries with keys inside the chunk
    updates: Tensor,  # [n, heads, C, dv]
    reads: Tensor | None,  # [n, heads, C, dk]; None: updates do not depend on the state
    through: Tensor,  # [n, heads, 1, 1]
    ended: set[int],  # chunks
) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
    """Return the outputs [n, heads, C, dv], handing the state from chunk to chunk.

    Returns also, for each chunk of `ended`, the state before it [heads, dk, dv], and what its tokens write,
    [heads, C, dv].
    """
    state = q.new_zeros(q.size(1), q.size(-1), updates.size(-1))
    outputs, kept = [], {}
    for chunk in range(q.size(0)):
        written = updates[chunk] if reads is None else updates[chunk] - reads[chunk] @ state
        if chunk in ended:
            kept[chunk] = state, written
        outputs.append(q[chunk] @ state + scores[chunk] @ written)
        state = through[chunk] * state + k[chunk].transpose(-1, -2) @ written
    return torch.stack(outputs), kept


def _state_behind(
    token: int,
    k: Tensor,  # [n, heads or groups, C, dk]
    decays: _Decays,
    before: Tensor,  # [heads, dk, dv], the state before the token's chunk
    written: Tensor,  # [heads, C, dv], by the tokens of the chunk
) -> Tensor:
    """Return the state of a token's document behind this token, [heads, dk, dv]."""
    chunk, place = divmod(token, CHUNK)
    keys = _times(k[chunk][None], decays.pairs[chunk, :, place, :, None][None])[0]
    return decays.entering[chunk, :, place, :, None] * before + keys.transpose(-1, -2) @ written


def delta_rule_step(
    q: Tensor,  # [n, heads or groups, dk], as in `gated_delta_rule`
    k: Tensor,  # the same
    v: Tensor,  # [n, heads, dv]
    g: Tensor,  # [n, heads], log of the decay, at most 0
    beta: Tensor | None,  # [n, heads]; None: no corrections
    states: Tensor,  # [n, heads, dk, dv], before the tokens
) -> tuple[Tensor, Tensor]:
    """Compute one token of each of n documents; return the outputs [n, heads, dv] and the states behind.

    All inputs are fp32 (or fp64), and so are the results.
    """
    q, k = (x.repeat_interleave(v.size(1) // x.size(1), dim=1) for x in (q, k))
    states = states * g.exp()[..., None, None]
    written = v[..., None, :]
    if beta is not None:
        written = beta[..., None, None] * (written - k[..., None, :] @ states)
    states = states + k[..., None] * written
    return (q[..., None, :] @ states)[..., 0, :], states
