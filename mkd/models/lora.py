"""Adapters (LoRA) on the linear layers of a student, under tensor and sequence parallelism.

The factor next to the dimension that tensor parallelism cuts is cut with it, the other one is whole:

    column-parallel layer   A [rank, in] whole      B [out/tp, rank] cut by rows
    row-parallel layer      A [rank, in/tp] cut     B [out, rank] whole

Without sequence parallelism a whole factor's gradient is complete on every rank, and bit-identical. With it
the factor sees the tokens of its rank alone, and its mark lets Megatron sum the gradients over the
tensor-parallel group. Keys of the weights in checkpoints are those of the layer without adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn

from mkd.models.attention import sharded_parameters
from mkd.models.nf4 import RoundedWeight, frozen_product, memory_for, take_weight
from mkd.plan.models.lora_shape import LoRAShape, is_factor


class Adapted:
    """Mixin in front of a linear layer: adds `scale` * B A x to its output.

    The layer keeps its own collectives; the gradient of the adapter's input joins through autograd.
    """

    weight: Tensor
    tp_group: dist.ProcessGroup
    lora: LoRAShape
    is_gated: bool  # rows of the weight are gate | up on every rank
    is_column: bool

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any):
        super().__init__(input_size, output_size, config=config, **options)  # type: ignore[call-arg]
        self.lora_group = vars(self).get("_tp_group") or self.tp_group  # of TE's layers, of Megatron's
        self.lora_scale = self.lora.scale
        self.rounded: RoundedWeight | None = None  # the weight in NF4; None: it is `weight`
        self.returns_bias = options.get("skip_bias_add", False)
        self.is_sequence_parallel = config.sequence_parallel and self.lora_group.size() > 1
        rows, columns = self.weight.shape
        like = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.lora_a = nn.Parameter(torch.zeros(self.lora.rank, columns, **like))
        self.lora_b = nn.Parameter(torch.zeros(rows, self.lora.rank, **like))
        cut, whole = (self.lora_b, self.lora_a) if self.is_column else (self.lora_a, self.lora_b)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=1 - self.is_column, stride=1)
        whole.sequence_parallel = self.is_sequence_parallel

    def forward(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output with the adapter's added, [t, 1, out(/tp)], and its bias."""
        if self.rounded is None:
            output, bias = super().forward(x, *args, **options)  # type: ignore[misc]
        else:
            output, bias = self._rounded_forward(x)
        inner = self._exchanged(F.linear(x, self.lora_a))
        flat = output.flatten(0, -2), inner.flatten(0, -2)
        return torch.addmm(*flat, self.lora_b.t(), alpha=self.lora_scale).view_as(output), bias

    def round_weight(self) -> None:
        """Store the weight in NF4 from now on."""
        self.rounded = take_weight(self)

    def frozen_weight(self) -> Tensor:
        """Return the weight that the layer multiplies with, [out(/tp), in(/tp)]."""
        return self.weight.detach() if self.rounded is None else self.rounded.dense()

    def _rounded_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Do the work of the layer with its rounded weight, collectives included."""
        assert self.rounded is not None, "the weight has been rounded"
        x = self._exchanged(x) if self.is_column else x
        output = frozen_product(x, self.rounded)
        output = output if self.is_column else self._exchanged(output)
        bias = getattr(self, "bias", None)
        if not isinstance(bias, nn.Parameter):  # Transformer Engine has an empty tensor in place of none
            return output, None
        return (output, bias) if self.returns_bias else (output + bias, None)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """Return A x [t(/tp), 1, rank] as B needs it, or what a rounded layer exchanges.

        Column: all tokens (backward: all-reduce SUM, with sequence parallelism reduce-scatter). Row: the sum
        over the tensor-parallel group (backward: identity, with sequence parallelism all-gather).
        """
        if self.lora_group.size() == 1:
            return inner
        if self.is_column:
            exchange = copy_to_tensor_model_parallel_region
            exchange = gather_from_sequence_parallel_region if self.is_sequence_parallel else exchange
        else:
            exchange = reduce_from_tensor_model_parallel_region
            exchange = reduce_scatter_to_sequence_parallel_region if self.is_sequence_parallel else exchange
        return exchange(inner, group=self.lora_group)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the layer's sharded state with both factors.

        Megatron gives the weight and bias of a gated MLP their order on disk, all gates before all rows of
        up, but no other parameter. B has the same rows.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        axes = {"lora_b": 0} if self.is_column else {"lora_a": 1}
        factors = {name: getattr(self, name) for name in ("lora_a", "lora_b")}
        given = prefix, sharded_offsets, metadata
        state |= sharded_parameters(factors, axes, self.lora_group, *given)
        if self.is_gated:
            name = f"{prefix}lora_b"
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


def adapted_column(linear: type, lora: LoRAShape | None, target: str, is_gated: bool = False) -> type:
    """Return a subclass of a column-parallel layer with an adapter, if `lora` has one at `target`."""
    return linear if lora is None or target not in lora.targets else _adapted(linear, lora, True, is_gated)


def adapted_row(linear: type, lora: LoRAShape | None, target: str) -> type:
    """Return a subclass of a row-parallel layer with an adapter, if `lora` has one at `target`."""
    return linear if lora is None or target not in lora.targets else _adapted(linear, lora, False, False)


@cache
def _adapted(linear: type, lora: LoRAShape, is_column: bool, is_gated: bool) -> type:
    members = dict(lora=lora, is_column=is_column, is_gated=is_gated)
    return type(f"{linear.__name__}WithAdapter", (Adapted, linear), members)


@contextmanager
def rounded_loading(layer: nn.Module) -> Iterator[None]:
    """Give a released decoder layer memory for its weights, and round those with adapters at the end."""
    memory_for(layer)
    yield
    for module in layer.modules():
        if isinstance(module, Adapted):
            module.round_weight()


def freeze_base(parts: Iterable[nn.Module]) -> None:
    """Let the adapters of these model parts learn, and nothing else. Call it before DDP takes parameters."""
    for part in parts:
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(is_factor(name))
