"""The gated delta net of Qwen3-Next and Qwen3.5, for packed documents.

A block is a key head with the value heads that share it. Megatron's own module takes no packs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from mkd.models.mixers.mixer import Mixer
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.recurrence import wide


class DeltaNet(Mixer):
    """A gated delta net in the place of attention.

    It is a projection, a convolution, the recurrence, a gated norm and a projection. The norm of a head has
    one weight for all heads. Each rank has the gradient of its heads; their sum over the tensor-parallel
    group is taken in backward, with sequence parallelism too.
    """

    of_blocks: ClassVar[tuple[str, ...]] = ("conv_weight", "A_log", "dt_bias")

    def _build_parameters(self, options: dict[str, Any]) -> None:
        heads = self.blocks * self.mixer.heads_per_block
        self._build_convolution(options)
        self.A_log = nn.Parameter(torch.empty(heads, **options).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(heads, **options))
        self.norm_weight = nn.Parameter(torch.ones(self.mixer.value_dim, **options))

    def _mix(self, projected: Tensor, rows: PackRows) -> Tensor:
        """Return the output, see `Mixer`. Recurrence and statistics are in fp32, as in transformers."""
        mixer, each = self.mixer, self.mixer.heads_per_block
        filters, a_log, dt_bias = map(self._of_this_rank, (self.conv_weight[:, 0], self.A_log, self.dt_bias))
        projected = projected.unflatten(1, (-1, sum(mixer.projected_parts)))
        mixed, z, b, a = projected.split(
            (sum(mixer.convolved_parts), each * mixer.value_dim, each, each), dim=-1
        )
        mixed = self.recurrence.convolve(mixed.flatten(1), filters, None, rows)
        q, k, v = mixed.unflatten(1, (-1, sum(mixer.convolved_parts))).split(mixer.convolved_parts, dim=-1)
        v, z = (x.reshape(x.size(0), -1, mixer.value_dim) for x in (v, z))
        b, a = (x.reshape(x.size(0), -1) for x in (b, a))
        g = -wide(a_log).exp() * F.softplus(wide(a) + dt_bias)
        output = self.recurrence.delta_rule(q, k, v, g, wide(b.sigmoid()), rows)
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return self.recurrence.gated_norm(output, z, weight, self.config.layernorm_epsilon).flatten(1)
