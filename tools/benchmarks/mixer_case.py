"""Operations of a gated delta net on packs of random inputs, and their errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.models.mixers.pack_rows import PackRows, pack_rows
from mkd.models.mixers.recurrence import PackedRecurrence
from mkd.models.packed import PackedDocuments, packed_documents

KERNEL_SIZE = 4  # tokens that the convolution sees
EPSILON = 1e-6

Operation = Callable[[PackedRecurrence, list[Tensor], PackRows], Tensor]
OPERATIONS: dict[str, tuple[Operation, tuple[str, ...]]] = {
    "delta rule": (lambda of, x, rows: of.delta_rule(*x, rows), ("q", "k", "v", "g", "beta")),
    "convolution": (lambda of, x, rows: of.convolve(*x, None, rows), ("x", "filters")),
    "gated norm": (lambda of, x, rows: of.gated_norm(*x, EPSILON), ("v", "gate", "weight")),
}
"""Name -> the call, and its inputs; all of them get gradients."""


@dataclass(frozen=True)
class MixerCase:
    """A pack, and the heads of a gated delta net."""

    lengths: tuple[int, ...]  # tokens of each document
    padding: int = 0  # tokens behind the last document
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 128
    value_dim: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding

    def __str__(self) -> str:
        heads = f"{self.key_heads} x {self.key_dim}, {self.heads} x {self.value_dim} channels"
        return f"{self.tokens} tokens, {len(self.lengths)} documents, {self.padding} padded, {heads}"

    def packed(self, device: torch.device) -> PackedDocuments:
        """Return the documents of the pack."""
        real = torch.tensor((0, *self.lengths), device=device).cumsum(0).int()
        padded = real.clone()
        padded[-1] += self.padding
        return packed_documents(real, padded, max(self.lengths) + self.padding)

    def rows(self, device: torch.device) -> PackRows:
        """Return the rows of the pack."""
        return pack_rows(self.packed(device), self.tokens, 1, device)

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
        """Return the inputs of all operations; those of the decay are fp32, as in a model."""
        generator = torch.Generator(device).manual_seed(seed)
        t, channels = self.tokens, 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        halves = dict(
            q=(t, self.key_heads, self.key_dim),
            k=(t, self.key_heads, self.key_dim),
            v=(t, self.heads, self.value_dim),
            gate=(t, self.heads, self.value_dim),
            weight=(self.value_dim,),
            x=(t, channels),
            filters=(channels, KERNEL_SIZE),
        )
        options = dict(device=device, generator=generator)
        found = {name: torch.randn(*size, **options).to(dtype) for name, size in halves.items()}
        decay = torch.randn(t, self.heads, **options).exp()  # states live from 1 to some 100 tokens
        return found | {"g": -0.1 * decay, "beta": torch.rand(t, self.heads, **options)}


def gradients(
    operations: PackedRecurrence, name: str, inputs: dict[str, Tensor], rows: PackRows, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output of an operation and the gradients of its inputs, for a random sum of the output."""
    call, names = OPERATIONS[name]
    leaves = [inputs[one].detach().clone().requires_grad_() for one in names]
    output = call(operations, leaves, rows)
    generator = torch.Generator(output.device).manual_seed(5)
    weights = torch.randn(output.shape, device=output.device, generator=generator).to(dtype)
    found = torch.autograd.grad(output, leaves, weights.to(output.dtype))
    return [output.detach(), *found]


def errors(
    case: MixerCase,
    operations: Sequence[PackedRecurrence],
    name: str,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, float]]:
    """Return the relative error of output and gradients, for each of `operations`.

    The reference computes with the same inputs, in float64 and plain torch.
    """
    rows, inputs = case.rows(device), case.inputs(device, dtype, seed=3)
    wide = {key: one.double() for key, one in inputs.items()}
    expected = gradients(PackedRecurrence(), name, wide, rows, dtype)
    labels = ("output", *OPERATIONS[name][1])
    found = []
    for one in operations:
        results = gradients(one, name, inputs, rows, dtype)
        found.append(
            {
                label: float((ours.double() - exact).norm() / exact.norm())
                for label, ours, exact in zip(labels, results, expected, strict=True)
            }
        )
    return found


def same_bits(
    case: MixerCase, operations: PackedRecurrence, name: str, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return True if output and gradients have the same bits in three runs of this process."""
    rows, inputs = case.rows(device), case.inputs(device, dtype, seed=3)
    first, *others = (gradients(operations, name, inputs, rows, dtype) for _ in range(3))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
