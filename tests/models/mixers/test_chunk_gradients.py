"""Check mkd's step of the fused backward against autograd in float64, and its list of chunks."""

from __future__ import annotations

import math

import torch

from mkd.models.mixers.chunk_gradients import chunk_gradients
from mkd.models.mixers.pack_rows import CHUNK, Segments

LENGTHS = (65, 1, 0, 130, 64, 0)
KEY_HEADS, HEADS, DK, DV = 2, 4, 8, 6
SCALE = 0.3


def segments() -> Segments:
    borders = torch.tensor((0, *LENGTHS)).cumsum(0)
    return Segments.of(borders, sum(LENGTHS))


def expected_chunks() -> list[tuple[int, int]]:
    counts = enumerate(math.ceil(length / CHUNK) for length in LENGTHS)
    return [(document, number) for document, count in counts for number in range(count)]


def test_the_list_has_all_chunks_and_then_some_behind_their_document():
    chunks = segments().chunks.tolist()
    expected = expected_chunks()
    assert chunks[: len(expected)] == [list(one) for one in expected]
    assert all(document == 0 and CHUNK * number >= LENGTHS[0] for document, number in chunks[len(expected) :])
    assert len(chunks) == sum(LENGTHS) // CHUNK + len(LENGTHS) > len(expected)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


def scalar_of(inputs: dict, chunk: int, rows: slice, u: torch.Tensor) -> torch.Tensor:
    """Return a scalar of one chunk with the given gradients do, dS and dv, for autograd."""
    q, k = (inputs[name][0, rows].repeat_interleave(HEADS // KEY_HEADS, 1).transpose(0, 1) for name in "qk")
    v, w, do, dv = (inputs[name][0, rows].transpose(0, 1) for name in ("v", "w", "do", "dv"))
    g, h, dh = inputs["g"][0, rows].t(), inputs["h"][0, chunk], inputs["dh"][0, chunk]
    pairs = (g[:, :, None] - g[:, None, :]).exp().tril()
    outputs = SCALE * (g.exp()[..., None] * (q @ h) + (q @ k.mT * pairs) @ v)
    behind = g[:, -1:, None].exp() * h.detach() + k.mT @ ((g[:, -1:] - g).exp()[..., None] * v)
    written = u - w @ h.detach()
    return (do * outputs).sum() + (dh * behind).sum() + (dv * written).sum()


def test_gradients_are_those_of_autograd():
    torch.manual_seed(0)
    t, where = sum(LENGTHS), segments()
    most = where.chunks.size(0)
    inputs = {name: random(1, t, KEY_HEADS, DK) for name in "qk"}
    inputs |= {name: random(1, t, HEADS, DV) for name in ("v", "do", "dv")}
    inputs |= {name: random(1, most, HEADS, DK, DV) for name in ("h", "dh")}
    inputs |= {"w": random(1, t, HEADS, DK), "g": -random(1, t, HEADS).abs()}
    for name in ("h", "dh"):
        inputs[name][:, len(expected_chunks()) :] = torch.nan  # chunks that nobody computes
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "w", "g")]
    total = torch.zeros((), dtype=torch.float64)
    for chunk, (document, number) in enumerate(expected_chunks()):
        begin = int(where.borders[document]) + CHUNK * number
        rows = slice(begin, min(begin + CHUNK, int(where.borders[document + 1])))
        total = total + scalar_of(inputs, chunk, rows, random(HEADS, rows.stop - begin, DV))
    expected = torch.autograd.grad(total, leaves)
    given = {name: one.detach() for name, one in inputs.items() if name not in ("w", "g")}
    g = inputs["g"].detach() / math.log(2)
    found = chunk_gradients(
        **given, g=g, scale=SCALE, cu_seqlens=where.borders, chunk_indices=where.chunks, chunk_size=CHUNK
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
