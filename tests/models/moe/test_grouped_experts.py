"""Check grouped experts against local ones, on a stand-in for Transformer Engine's products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLPSubmodules
from torch import nn

from tests.tiny_models import config_of

COUNTS = (3, 0, 5, 1, 0, 7, 2, 6)


class GroupedLinear(nn.Module):
    """The interface of Megatron's grouped layers on Transformer Engine, in plain torch."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, skip_bias_add, **unused):
        super().__init__()
        self.size, self.bias, self.returns_bias = num_gemms, bias, skip_bias_add
        for index in range(num_gemms):
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
            self.register_parameter(f"weight{index}", nn.Parameter(weight))
            if bias:
                self.register_parameter(f"bias{index}", nn.Parameter(weight[:, 0].clone()))

    def forward(self, rows, splits):
        weights, biases = (
            [getattr(self, f"{kind}{index}", None) for index in range(self.size)]
            for kind in ("weight", "bias")
        )
        added = [None] * self.size if self.returns_bias else biases
        parts = zip(rows.split(splits), weights, added, strict=True)
        return torch.cat([F.linear(*part) for part in parts]), biases if self.returns_bias and biases[
            0
        ] is not None else None


def both(family, dtype):
    """Return output and gradients by name: of grouped experts, and of local ones in fp32."""
    from mkd.models.moe.experts import GroupedExperts, LocalExperts
    from mkd.models.moe.layer import LOCAL_EXPERTS
    from mkd.models.transformer_config import ModelOptions, transformer_config
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.platform import detect

    context, shape = ParallelContext.create(detect()), ModelShape.from_hf_config(config_of(family))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(COUNTS), shape.hidden_size, generator=generator).to(dtype)
    weights = torch.rand(sum(COUNTS), generator=generator)
    factor = torch.randn(inputs.shape, generator=generator)
    results = []
    grouped = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    kinds = ((GroupedExperts, grouped, dtype), (LocalExperts, LOCAL_EXPERTS.linears, torch.float32))
    for kind, linears, own in kinds:
        layout = PipelineLayout.even(shape.num_layers, 1)
        config = transformer_config(shape, layout, ModelOptions(dtype=own), context)
        experts = kind(len(COUNTS), config, linears, pg_collection=context.groups)
        parameters = dict(experts.named_parameters())
        for index in range(len(COUNTS)):
            for product, name in ((1, "weight"), (1, "bias"), (2, "weight"), (2, "bias")):
                parameter = parameters.get(f"linear_fc{product}.{name}{index}")
                if parameter is None and name == "bias" and not shape.moe.biases:
                    continue
                if parameter is None:
                    parameter = parameters[f"local_experts.{index}.linear_fc{product}.{name}"]
                seeded = torch.Generator().manual_seed(10 * index + 2 * product + (name == "bias"))
                drawn = 0.3 * torch.randn(parameter.shape, generator=seeded)
                parameter.data.copy_(drawn.to(dtype))
                parameter.order = (index, product, name)
        rows, scales = inputs.to(own).clone().requires_grad_(), weights.clone().requires_grad_()
        output, bias = experts(rows, torch.tensor(COUNTS), scales)
        assert bias is None and output.dtype == own
        (output * factor).sum().backward()
        found = {parameter.order: parameter.grad for parameter in parameters.values()}
        assert all(parameter.allreduce is False for parameter in parameters.values())
        assert not any(getattr(parameter, "sequence_parallel", False) for parameter in parameters.values())
        found |= {"output": output.detach(), "rows": rows.grad, "weights": scales.grad}
        results.append(found)
    return results


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("family", "kinds"), [("gpt_oss", 4), ("nemotron_h-nano", 2)])
def test_values_and_gradients_are_those_of_local_experts(family, kinds, dtype, tolerance, ranks):
    """Two experts have no rows: their gradients are zero.

    GPT-OSS has four parameters an expert, and its gates and up projections reach their limit. Nemotron-H has
    no gates and no biases.
    """
    ((grouped, local),) = ranks.run(both, 1, family, dtype)
    assert grouped.keys() == local.keys() and len(local) == kinds * len(COUNTS) + 3
    for name, expected in local.items():
        difference, size = (grouped[name].float() - expected).norm(), expected.norm()
        assert difference <= tolerance * size, f"{name}: {float(difference / size):.1e}"
    assert sum(not gradient.any() for gradient in local.values()) == 2 * kinds
