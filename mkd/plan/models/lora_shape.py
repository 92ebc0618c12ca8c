"""Adapters of a student (LoRA): which linear layers have one, and how many parameters that is.

y = W x + alpha / rank * B A x, with A [rank, in] and B [out, rank]. Source: Hu et al. 2021, LoRA (arXiv
2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.model_shape import ModelShape

NF4 = "nf4"
NF4_BLOCK = 64
"""Neighbouring weights of a row that share a scale."""
NF4_BYTES = 0.5 + 4 / NF4_BLOCK
"""Bytes of a weight: 4 bits, and its share of an fp32 scale."""

FACTORS = (".lora_a", ".lora_b")
"""Ends of the names of the parameters of adapters: A and B."""


def is_factor(name: str) -> bool:
    """Return True for the name of a parameter of an adapter."""
    return name.endswith(FACTORS)


class AdaptedLinear(NamedTuple):
    """The weight [output, input] of a linear layer that has an adapter, as one process holds it."""

    target: str
    input: int
    output: int


@dataclass(frozen=True)
class LoRAShape:
    """Rank, scale and places of the adapters of a model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # of `LINEAR_LAYERS`
    precision: str = "bf16"  # storage of the weights that have adapters: that of the run, or nf4

    @classmethod
    def of(cls, config: Config) -> LoRAShape | None:
        """Return the adapters of a run's student; None if all of its weights learn."""
        settings = config.lora
        if settings.lora_rank is None:
            return None
        alpha = 2.0 * settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha
        return cls(settings.lora_rank, alpha, settings.lora_targets, settings.lora_base)

    @property
    def scale(self) -> float:
        """Factor on every adapter's output."""
        return self.alpha / self.rank

    def linears(self, shape: ModelShape, layer: LayerShape, tensor: int = 1) -> list[AdaptedLinear]:
        """Return the linear layers of a decoder layer that have adapters, as one process holds them."""
        return [one for one in _linears(shape, layer, tensor) if one.target in self.targets]

    @property
    def is_rounded(self) -> bool:
        """True if the weights that have adapters are stored in NF4."""
        return self.precision == NF4

    def weights(self, shape: ModelShape, layers: Sequence[LayerShape], tensor: int = 1) -> int:
        """Count the weights that have adapters in these layers on one process."""
        return sum(one.input * one.output for layer in layers for one in self.linears(shape, layer, tensor))

    def parameters(self, shape: ModelShape, layers: Sequence[LayerShape], tensor: int = 1) -> int:
        """Count the parameters of the adapters of these layers on one process."""
        found = (one for layer in layers for one in self.linears(shape, layer, tensor))
        return sum(self.rank * (one.input + one.output) for one in found)


def _linears(shape: ModelShape, layer: LayerShape, tensor: int) -> Iterator[AdaptedLinear]:
    hidden, own = shape.hidden_size, shape.for_layer(layer)
    groups = own.padded_query_groups(tensor) // tensor
    heads, mla, moe = groups * own.heads_per_group, layer.mla, layer.moe
    if layer.mixer is not None:
        yield AdaptedLinear("qkv", hidden, layer.mixer.projected_width // tensor)
        yield AdaptedLinear("proj", layer.mixer.output_width // tensor, hidden)
    elif mla is not None:
        yield AdaptedLinear("qkv", mla.q_lora_rank or hidden, heads * mla.qk_head_dim)
        yield AdaptedLinear("qkv", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        yield AdaptedLinear("proj", heads * mla.v_head_dim, hidden)
    elif layer.mixes_tokens:
        rows = (1 + layer.output_gate) * heads + (2 - layer.shared_key_value) * groups
        yield AdaptedLinear("qkv", hidden, rows * own.head_dim)
        yield AdaptedLinear("proj", heads * own.head_dim, hidden)
    matrices = layer.mlp_matrices if moe is None else moe.mlp_matrices
    width = (layer.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size) // tensor
    if layer.has_mlp and width:
        yield AdaptedLinear("fc1", hidden, (matrices - 1) * width)
        yield AdaptedLinear("fc2", width, hidden)
