"""Adapters (LoRA) of a model part: their first values, and weights with their adapters added.

The modules that have adapters are `mkd.models.lora.Adapted`: they have `lora_a`, `lora_b`, `lora_scale` and
`frozen_weight`.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_names import factor_map
from mkd.parallel.context import ParallelContext
from mkd.plan.models.lora_shape import is_factor
from mkd.plan.models.model_shape import ModelShape


def adapters_of(model_part: nn.Module) -> dict[str, nn.Module]:
    """Return name -> linear layer of every layer of a model part that has an adapter."""
    return {name: one for name, one in model_part.named_modules() if hasattr(one, "lora_a")}


@torch.no_grad()
def start_adapters(
    model_part: nn.Module, shape: ModelShape, context: ParallelContext, first_layer: int, seed: int
) -> None:
    """Give every adapter its first values, which no layout changes: B is 0, A as in PEFT.

    A is uniform in +-1 / sqrt(in). Its columns for padded heads are 0 and stay 0: then these heads, whose
    weights are 0, get no gradient.
    """
    for name, linear in adapters_of(model_part).items():
        linear.lora_b.zero_()
        factor = linear.lora_a
        found = factor_map(shape, f"{name}.lora_a", tuple(factor.shape), first_layer)
        (tensor, full), *_ = found.tensor_shapes().items()
        generator = torch.Generator().manual_seed(seed + zlib.crc32(tensor.encode()))
        bound = 1 / math.sqrt(full[1])
        whole = torch.empty(full, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        factor.zero_()
        for piece in found.pieces(tuple(factor.shape), context.tp_rank, context.tp_size):
            piece.in_shard(factor).copy_(piece.in_tensor(whole))


@torch.no_grad()
def with_adapter(model_part: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, `weight`, with the product of its adapter's factors added.

    W + scale * B A is computed in fp32 and returned in fp32. A parameter without adapter is returned as it
    is. Each rank's product is its shard of the whole product: nothing is communicated.
    """
    module, _, leaf = name.rpartition(".")
    linear = model_part.get_submodule(module)
    if leaf != "weight" or not hasattr(linear, "lora_a"):
        return weight
    product = linear.lora_b.float() @ linear.lora_a.float()
    return torch.add(linear.frozen_weight().float(), product, alpha=linear.lora_scale)


def factors_of(model_part: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter of all adapters of a model part."""
    return {name: one for name, one in model_part.named_parameters() if is_factor(name)}
