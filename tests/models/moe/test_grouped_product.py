"""Check products of many experts against one product after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mkd.models.moe.grouped_product import can_group, grouped_product, place_side_by_side, stacked
from mkd.models.placed.residency import layer_parameters
from mkd.platform.host_memory import packed_bytes, packed_views

COUNTS = torch.tensor([5, 0, 1, 9])  # rows of each expert; one is idle
WIDTHS = 16, 24


def make_weights(experts: int = len(COUNTS)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(WIDTHS[::-1], generator=generator).bfloat16()) for _ in range(experts)]


def move_together(weights: list[nn.Parameter]) -> nn.Module:
    """Register the weights in a module, side by side."""
    module, names = nn.Module(), [f"weight{i}" for i in range(len(weights))]
    for name, weight in zip(names, weights, strict=True):
        module.register_parameter(name, weight)
    place_side_by_side(module, names)
    return module


@pytest.mark.parametrize("are_side_by_side", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_a_product_for_each_expert(device, are_side_by_side):
    weights = [nn.Parameter(weight.detach().to(device)) for weight in make_weights()]
    if are_side_by_side:
        move_together(weights)
    generator = torch.Generator().manual_seed(2)
    rows, factor = (torch.randn(15, width, generator=generator).bfloat16().to(device) for width in WIDTHS)
    rows.requires_grad_()
    found = grouped_product(rows, COUNTS, weights)
    gradients = torch.autograd.grad(found, (rows, *weights), factor)

    exact = [leaf.detach().double().requires_grad_() for leaf in (rows, *weights)]
    parts = exact[0].split(COUNTS.tolist())
    expected = torch.cat([part @ weight.T for part, weight in zip(parts, exact[1:], strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, exact, factor.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=2e-2)
    assert not gradients[2].any(), "an idle expert has a gradient of zeros"


def test_weights_that_follow_each_other_are_not_copied():
    weights = make_weights()
    apart = stacked(weights)
    move_together(weights)
    view = stacked(weights)
    assert torch.equal(view, apart) and view.data_ptr() == weights[0].data_ptr()
    assert stacked(weights[::-1]).data_ptr() != weights[-1].data_ptr()
    assert torch.equal(stacked(weights[::-1]), apart.flip(0))


def wrapped_layers(distributed_optimizer=False):
    """Return Megatron's wrapper of two layers, and the weights of each, in Megatron's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    layers = [make_weights(), make_weights()]
    model = nn.ModuleList(map(move_together, layers))
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = model.to(context.device)
    return DistributedDataParallel(config, settings, model, pg_collection=context.groups), layers


def view_in_buffers(distributed_optimizer):
    """Return which weights and gradients are views."""
    _, layers = wrapped_layers(distributed_optimizer)
    groups = layers + [[weight.main_grad for weight in weights] for weights in layers]
    expected = [make_weights()] * 2
    for found, weights in zip(layers, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    return [stacked(group).data_ptr() == group[0].data_ptr() for group in groups]


def test_weights_that_are_streamed_are_not_copied():
    """Weights of a teacher on the host or over peers are views of one buffer while their layer computes."""
    weights = make_weights()
    parameters = layer_parameters(move_together(weights))
    buffer = torch.empty(packed_bytes(parameters), dtype=torch.uint8)
    for parameter, place in zip(parameters, packed_views(buffer, parameters), strict=True):
        parameter.data = place.copy_(parameter.data)
    assert stacked(weights).data_ptr() == weights[0].data_ptr()


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_weights_stay_together_in_buffers(distributed_optimizer, ranks):
    assert ranks.run(view_in_buffers, 1, distributed_optimizer) == [[True] * 4]


def accumulated_gradients():
    """Return calls of `add_` by Megatron, gradients of two micro-batches in its buffers, and their sums."""
    model, (weights, _) = wrapped_layers()
    expected, calls = [torch.zeros(weight.shape) for weight in weights], 0
    add = torch.Tensor.add_

    def counted(self, *args, **options):
        nonlocal calls
        calls += 1
        return add(self, *args, **options)

    torch.Tensor.add_ = counted
    try:
        for step in range(2):
            model.zero_grad_buffer()
            for total in expected:
                total.zero_()
            for seed in range(2):
                generator = torch.Generator().manual_seed(10 * step + seed)
                rows = torch.randn(15, WIDTHS[0], generator=generator).bfloat16().to(weights[0].device)
                plain = [nn.Parameter(weight.detach().clone()) for weight in weights]
                grouped_product(rows, COUNTS, plain).square().sum().backward()
                for total, weight in zip(expected, plain, strict=True):
                    add(total, weight.grad.float().cpu())
                grouped_product(rows, COUNTS, weights).square().sum().backward()
                assert all(weight.grad is None for weight in weights), "the hooks have run"
    finally:
        torch.Tensor.add_ = add
    return calls, [weight.main_grad.cpu() for weight in weights], expected


def check_accumulation(pool):
    ((calls, found, expected),) = pool.run(accumulated_gradients, 1)
    assert calls == 4, "one addition for each micro-batch of each step"
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert any(gradient.any() for gradient in found)


def test_gradients_are_added_to_the_buffers_in_one_call(ranks):
    check_accumulation(ranks)


@pytest.mark.gpu
def test_gradients_are_added_to_the_buffers_in_one_call_on_a_gpu(gpu_ranks):
    check_accumulation(gpu_ranks)


def test_neighbours_by_chance_are_copied():
    """Two storages may lie side by side; a view must not leave the first."""
    memory = np.arange(12.0)
    halves = [torch.from_numpy(half).view(2, 3) for half in np.split(memory, 2)]
    found = stacked(halves)
    assert torch.equal(found, torch.stack(halves)) and found.data_ptr() != halves[0].data_ptr()


def test_refuses_what_the_kernel_does_not_take():
    weights, rows = make_weights(), torch.zeros(3, 16, dtype=torch.bfloat16)
    assert can_group(rows, weights)
    assert not can_group(rows.float(), weights) and not can_group(rows[:0], weights)
    assert not can_group(rows, [nn.Parameter(weight[:20]) for weight in weights])
