"""The LM head as a module that lends its weight to a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


class LMHead(ColumnParallelLinear):
    """Megatron's vocabulary-parallel head. Called with `use`, it makes no logits but returns `use(weight)`.

    It is a call of the module, so that hooks see it: with overlapped parameter gathers Megatron's DDP waits for a module's
    parameters in its forward pre-hook.
    """

    @classmethod
    def replacing(cls, head: ColumnParallelLinear) -> LMHead:
        """The same head, sharing its weight (None where it is tied to the embedding of this stage)."""
        new = cls(
            head.input_size,
            head.output_size,
            config=head.config,
            init_method=head.config.init_method,
            bias=False,
            gather_output=head.gather_output,
            skip_weight_param_allocation=True,
            tp_group=head.tp_group,
        )
        new.weight = head.weight
        return new

    def forward(
        self,
        input_: Tensor | None,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        use: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        if use is None:
            return super().forward(input_, weight, runtime_gather_output)
        return use(self.weight if weight is None else weight)
