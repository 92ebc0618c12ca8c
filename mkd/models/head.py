"""The LM head as a module that hands out its weight, so that a loss can compute the logits itself."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


class LMHead(ColumnParallelLinear):
    """Megatron's vocabulary-parallel head. Called without an input, it returns its weight.

    In that case it makes no logits. Asking for the weight calls the module on purpose, so that hooks see it.
    With overlapped parameter gathers, Megatron's DDP waits for a module's parameters in its forward pre-hook.
    """

    def forward(
        self, input_: Tensor | None, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        """Return Megatron's (logits, bias) of `input_`, or the weight if there is no input."""
        if input_ is None:
            return self.weight if weight is None else weight
        return super().forward(input_, weight, runtime_gather_output)
