"""The operations of a mixer in which a token meets earlier ones.

While a student samples, operations that remember the tokens of earlier rows take their place: see
`kinds/sampled/sampler/recurrent_state.py`.
"""

from __future__ import annotations

from torch import Tensor

from mkd.models.mixers.convolution import causal_convolution
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.scan import gated_delta_rule


class PackedRecurrence:
    """Operations on the rows of a whole pack, whose documents begin with nothing before them."""

    def convolve(self, x: Tensor, filters: Tensor, rows: PackRows) -> Tensor:
        """Return the convolution [t, c] of `x` [t, c] with `filters` [c, k]; see `causal_convolution`."""
        return causal_convolution(x, filters, rows.positions)

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv] of the inputs of `gated_delta_rule`."""
        return gated_delta_rule(q, k, v, g, beta, rows.documents)[0]

    def decayed_sum(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv] of `gated_delta_rule` without corrections."""
        return gated_delta_rule(q, k, v, g, None, rows.documents)[0]
