"""The Mamba-2 mixer of Nemotron-H, for packed documents.

A block is a group, one B and one C, with the heads that share them. Megatron's own module calls kernels that
have to be compiled for the machine.

transformers raises steps below `time_step_min` to it and ignores `time_step_limit`; Megatron does neither.
mkd follows transformers. Its loop over single tokens, in `generate`, does not raise them: mkd samples as it
trains.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkd.models.mixers.mixer import Mixer
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.recurrence import wide


class Mamba(Mixer):
    """Mamba-2 in the place of attention.

    It is a projection, a convolution, the recurrence of `MambaShape`, a gated norm over the heads of a group,
    and a projection.
    """

    of_blocks: ClassVar[tuple[str, ...]] = (
        *("conv_weight", "conv_bias", "A_log", "dt_bias"),
        *("D", "norm_weight"),
    )

    def _build_parameters(self, options: dict[str, Any]) -> None:
        heads = self.blocks * self.mixer.heads_per_block
        first = self.tp_group.rank() * heads
        self._build_convolution(options)
        self.conv_bias = nn.Parameter(torch.zeros(self.conv_weight.size(0), **options))
        numbers = torch.arange(first + 1, first + heads + 1, device=options["device"])
        self.A_log = nn.Parameter(numbers.log().to(options["dtype"]))
        self.dt_bias = nn.Parameter(torch.ones(heads, **options))
        self.D = nn.Parameter(torch.ones(heads, **options))
        self.norm_weight = nn.Parameter(torch.ones(heads * self.mixer.value_dim, **options))

    def _mix(self, projected: Tensor, rows: PackRows) -> Tensor:
        """Return the output, see `Mixer`. From the recurrence to the norm it is fp32, as in transformers."""
        mixer, each = self.mixer, self.mixer.heads_per_block
        filters, bias, a_log, dt_bias, skip = map(
            self._of_this_rank, (self.conv_weight[:, 0], self.conv_bias, self.A_log, self.dt_bias, self.D)
        )
        projected = projected.unflatten(1, (-1, sum(mixer.projected_parts)))
        z, mixed, step = projected.split((each * mixer.value_dim, sum(mixer.convolved_parts), each), dim=-1)
        mixed = self.recurrence.convolve(mixed.flatten(1), filters, bias, rows)
        x, b, c = mixed.unflatten(1, (-1, sum(mixer.convolved_parts))).split(mixer.convolved_parts, dim=-1)
        x = wide(x).reshape(x.size(0), -1, mixer.value_dim)
        b, c = wide(b), wide(c)
        step = F.softplus(wide(step).flatten(1) + dt_bias).clamp(min=mixer.least_step)
        g = -wide(a_log).exp() * step
        output = self.recurrence.decayed_sum(c, b, x * step[..., None], g, rows)
        output = output + wide(skip)[:, None] * x
        return self._gated_norm(output.unflatten(1, (-1, each)).flatten(2), z).to(projected.dtype)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:  # [t, blocks, n] twice -> [t, blocks * n]
        """Return RMSNorm over each group of `x` times SiLU of the gate, in the dtype of `x`."""
        x = x * F.silu(wide(gate))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return self._of_this_rank(self.norm_weight) * (x * scale).flatten(1)
