"""MLPs of towers, with channels of zeros up to a multiple of 8.

Rows of 8 half-precision channels are what tensor cores read at once; a product of another width takes a
slower kernel. Qwen2.5-VL's towers have 3,420 channels. The weights stay as they are: zeros are appended in
each pass, which copies them once for a whole micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE = 8


class AlignedMLP(nn.Module):
    """transformers' gated MLP, `down(act(gate(x)) * up(x))`, with the same modules under the same names."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.gate_proj: nn.Linear = mlp.gate_proj
        self.up_proj: nn.Linear = mlp.up_proj
        self.down_proj: nn.Linear = mlp.down_proj
        self.act_fn: nn.Module = mlp.act_fn
        self.added = -self.down_proj.in_features % MULTIPLE

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Map patches [n, h] to [n, h], in the weights' dtype.

        Zeros in both factors give zeros, which the last product ignores.
        """
        gate, up = (self._wider(module, hidden_state) for module in (self.gate_proj, self.up_proj))
        weight = F.pad(self.down_proj.weight, (0, self.added))
        return F.linear(self.act_fn(gate) * up, weight, self.down_proj.bias)

    def _wider(self, linear: nn.Linear, hidden_state: Tensor) -> Tensor:
        bias = None if linear.bias is None else F.pad(linear.bias, (0, self.added))
        return F.linear(hidden_state, F.pad(linear.weight, (0, 0, 0, self.added)), bias)


def align_mlps(visual: Any) -> None:
    """Give the blocks of transformers' tower aligned MLPs, where theirs are gated and of another width."""
    for block in visual.blocks:
        down = getattr(block.mlp, "down_proj", None)
        if down is not None and down.in_features % MULTIPLE:
            block.mlp = AlignedMLP(block.mlp)
