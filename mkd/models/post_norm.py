"""A norm of the output of attention or MLP, before the residual addition.

It is a part of the linear layer that ends the block.
"""

from __future__ import annotations

from functools import cache

from megatron.core.transformer import TransformerConfig
from torch import Tensor


class PostNorm:
    """Mixin in front of a row-parallel linear layer without bias, which normalises the layer's output.

    It applies to the sum over the tensor-parallel group. With sequence parallelism the layer returns this
    rank's share of the tokens; the norm marks its weight accordingly.
    """

    norm_class: type

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = self.norm_class(
            config=config, hidden_size=output_size, eps=config.layernorm_epsilon
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the normalised product [t(/tp), 1, h], and None.

        The None is the bias, which Megatron would add later.
        """
        output, bias = super().forward(x)
        assert bias is None, "a bias would have to be added before the norm"
        return self.post_layernorm(output), None


@cache
def with_post_norm(linear: type, norm: type) -> type:
    """Return a subclass of the row-parallel layer `linear` that ends with `norm`.

    `linear` may be Megatron's or Transformer Engine's.
    """
    return type(f"{linear.__name__}WithNorm", (PostNorm, linear), {"norm_class": norm})
