"""Check the gradients that a training pass captures, and what is left of a pass that could not be made.

A CPU has no graphs: in their place, work is carried out again.
"""

from __future__ import annotations

import pytest
import torch

from mkd.models.graphs.bounds import Bounds
from mkd.models.graphs.graph_memory import Slot
from mkd.models.graphs.layer_input import LayerInput
from mkd.models.graphs.passes import TrainingPass
from mkd.models.graphs.sections import HIDDEN, Section
from mkd.models.packed import packed_documents
from tests.models.graphs.replayed_graphs import graph_memory, replayed_graphs


class Fused(torch.autograd.Function):
    """A product that adds the gradient of its weight to `main_grad` itself, as Transformer Engine's do."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return hidden * weight

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        ctx.weight.main_grad.add_((gradient * hidden).sum((0, 1)))
        ctx.weight.grad_added_to_main_grad = True
        return gradient * ctx.weight, torch.full_like(ctx.weight, float("nan"))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.randn(3))
        self.product = torch.nn.Parameter(torch.randn(3))
        self.scale = torch.nn.Parameter(torch.randn(3))

    def forward(self, hidden):
        return Fused.apply(hidden * self.norm, self.product) * self.scale


@pytest.fixture
def without_gpu():
    with replayed_graphs():
        yield


def example(hidden):
    borders = torch.tensor([0, 4, 5], dtype=torch.int32)
    return LayerInput(hidden, None, packed_documents(borders, borders, 4, padding_joins_document=True))


def made(layer, hidden):
    memory = graph_memory()
    slot = memory.free_slot(hidden)
    section = Section(lambda tensors, given: {HIDDEN: layer(tensors[HIDDEN])}, dict(layer.named_parameters()))
    one_pass = slot.passes[layer, Bounds(5, 4, 256)] = TrainingPass(
        layer, [section], example(hidden), slot, memory
    )
    return memory, slot, one_pass


def test_every_gradient_is_added_once_to_main_grad_and_none_stays(without_gpu):
    torch.manual_seed(0)
    layer, hidden = Layer(), torch.randn(5, 1, 3, requires_grad=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.5)
        parameter.grad_added_to_main_grad = True  # left by an earlier step
    parameters = dict(layer.named_parameters())
    _, slot, one_pass = made(layer, hidden)
    assert dict(layer.named_parameters()) == parameters  # the stand-ins have gone
    for number in (1, 2):  # micro-batches
        (2.0 * one_pass.run(example(hidden))).sum().backward()
        output = 2.0 * number * (hidden * layer.norm * layer.product * layer.scale)
        expected = torch.autograd.grad(output.sum(), [hidden, *layer.parameters()])
        assert torch.allclose(hidden.grad, expected[0]) and not slot.in_use
        for parameter, gradient in zip(layer.parameters(), expected[1:], strict=True):
            assert torch.allclose(parameter.main_grad, 0.5 + gradient) and parameter.grad is None


def test_graphs_of_a_part_are_dropped_with_slots_that_nothing_uses(without_gpu):
    layer, hidden = Layer(), torch.randn(5, 1, 3, requires_grad=True)
    for parameter in layer.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    memory, slot, _ = made(layer, hidden)
    slot.in_use = True
    memory.drop(layer)
    assert memory.slots == [slot] and slot.passes  # its backward is still to come
    slot.in_use = False
    memory.slots.append(Slot(hidden))
    memory.drop(layer)
    assert memory.slots == []


def test_release_frees_graphs_that_something_refers_to(without_gpu):
    """An autograd graph of the last step, for instance."""
    layer, hidden = Layer(), torch.randn(5, 1, 3, requires_grad=True)
    for parameter in layer.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    memory, _, passes = made(layer, hidden)
    graphs = list(memory.graphs)
    memory.release()
    assert len(graphs) == 2 and all(graph.is_reset for graph in graphs) and passes is not None
    assert memory.slots == [] and not memory.graphs
