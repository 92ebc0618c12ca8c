"""Check mkd's step of the fused backward against autograd in float64, and its list of chunks.

No operation of either, or of the scan, makes the host wait for the device: a graph could not be captured.
"""

from __future__ import annotations

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mkd.models.mixers.chunk_gradients import chunk_gradients
from mkd.models.mixers.pack_rows import CHUNK, Segments, pack_rows
from mkd.models.mixers.recurrence import PackedRecurrence
from tools.benchmarks.mixer_case import OPERATIONS, MixerCase, gradients

LENGTHS = (65, 1, 0, 130, 64, 0)
KEY_HEADS, HEADS, DK, DV = 2, 4, 8, 6
SCALE = 0.3
WAITING = {  # operations that read a tensor on the host, or copy from it
    "aten.lift_fresh.default",
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.repeat_interleave.Tensor",
}


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


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


def test_the_host_waits_for_the_device_nowhere():
    case, device = MixerCase((5, 3, 70), 7, key_dim=8, value_dim=8), torch.device("cpu")
    packed, inputs = case.packed(device), case.inputs(device, torch.float32, seed=1)
    with Operations() as found:
        rows = pack_rows(packed, case.tokens, 1, device)
        assert rows.segments is rows.segments
        for name in OPERATIONS:
            gradients(PackedRecurrence(), name, inputs, rows, torch.float32)
        run_chunk_gradients(random_inputs(case.tokens, rows.segments), rows.segments)
    assert not found.names & WAITING


def random_inputs(t: int, where: Segments) -> dict[str, torch.Tensor]:
    """Return the inputs of `chunk_gradients`, and `w`, of which it needs the gradient alone."""
    most = where.chunks.size(0)
    inputs = {name: random(1, t, KEY_HEADS, DK) for name in "qk"}
    inputs |= {name: random(1, t, HEADS, DV) for name in ("v", "do", "dv")}
    inputs |= {name: random(1, most, HEADS, DK, DV) for name in ("h", "dh")}
    return inputs | {"w": random(1, t, HEADS, DK), "g": -random(1, t, HEADS).abs()}


def run_chunk_gradients(inputs: dict[str, torch.Tensor], where: Segments) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, w and g."""
    given = {name: one.detach() for name, one in inputs.items() if name != "w"}
    given["g"] = given["g"] / math.log(2)
    places = dict(cu_seqlens=where.borders, chunk_indices=where.chunks, chunk_size=CHUNK)
    return chunk_gradients(**given, scale=SCALE, **places)


def test_gradients_are_those_of_autograd():
    torch.manual_seed(0)
    where = segments()
    inputs = random_inputs(sum(LENGTHS), where)
    for name in ("h", "dh"):
        inputs[name][:, len(expected_chunks()) :] = torch.nan  # chunks that nobody computes
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "w", "g")]
    total = torch.zeros((), dtype=torch.float64)
    for chunk, (document, number) in enumerate(expected_chunks()):
        begin = int(where.borders[document]) + CHUNK * number
        rows = slice(begin, min(begin + CHUNK, int(where.borders[document + 1])))
        total = total + scalar_of(inputs, chunk, rows, random(HEADS, rows.stop - begin, DV))
    expected = torch.autograd.grad(total, leaves)
    found = run_chunk_gradients(inputs, where)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
