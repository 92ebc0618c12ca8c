"""Passes of decoder layers as CUDA graphs, with the tensors that these read and write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from mkd.models.graphs.capture import graph_safe_random_states, recorded
from mkd.models.graphs.graph_memory import Border, GraphMemory, Slot
from mkd.models.graphs.layer_input import LayerInput
from mkd.models.graphs.sections import HIDDEN, EagerSection, Section, Tensors
from mkd.models.graphs.stand_ins import addresses, replaced, stand_in

Sections = Sequence[Section | EagerSection]
AfterBackward = Callable[[Collection[nn.Parameter]], None]


class ForwardPass:
    """The layers of a frozen model, without autograd."""

    def __init__(self, sections: Sections, example: LayerInput, memory: GraphMemory):
        self._input = example.fixed(memory.buffer(HIDDEN, example.hidden))
        self._steps: list[_FrozenGraph | _FrozenEager] = []
        tensors = {HIDDEN: self._input.hidden}
        with memory.counted(), graph_safe_random_states() as generators:
            for section in sections:
                if isinstance(section, Section):
                    graph = _FrozenGraph(section, tensors, self._input, memory)
                    graph.record(generators)
                    self._steps.append(graph)
                else:
                    self._steps.append(_FrozenEager(section, tensors, self._input, memory))
                tensors = self._steps[-1].after
        self._output = tensors[HIDDEN]

    def run(self, given: LayerInput) -> Tensor:
        """Return the hidden state, [t(/tp), 1, h], in a new tensor."""
        self._input.hidden.copy_(given.hidden)
        self._input.take(given)
        for step in self._steps:
            step.run()
        return self._output.clone()


class _FrozenGraph:
    """A section of frozen layers as a graph."""

    def __init__(self, section: Section, before: Tensors, given: LayerInput, memory: GraphMemory):
        self._section, self._before, self._given, self._memory = section, before, given, memory
        self.after: Tensors = {}
        self.run: Callable[[], None] = self._work

    def record(self, generators: list[torch.Generator]) -> None:
        graph = recorded(self._work, self._memory.scratch, self._memory.stream, generators)
        self.run = self._memory.noted(graph).replay

    def _work(self) -> None:
        for name, value in self._section.run(self._before, self._given).items():
            self.after[name] = self._memory.buffer(name, value).copy_(value)


class _FrozenEager:
    """Work between two graphs of frozen layers."""

    def __init__(self, section: EagerSection, before: Tensors, given: LayerInput, memory: GraphMemory):
        self._section, self._before, self._given = section, before, given
        self._made = {name: memory.buffer(name, before[like]) for name, like in section.makes.items()}
        self.after: Tensors = section.tensors_after(before) | self._made

    def run(self) -> None:
        for name, value in self._section.run(self._before, self._given).items():
            self._made[name].copy_(value)


class TrainingPass:
    """Forward and backward of the layers of a model that is trained.

    Gradients of parameters in graphs are added to their `main_grad` there, and their hooks do not run; see
    stand_ins.py. Those of parameters between graphs are as without graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        sections: Sections,  # of `module`
        example: LayerInput,
        slot: Slot,
        memory: GraphMemory,
        after_backward: AfterBackward | None = None,
    ):
        self._slot = slot
        graphed = [section for section in sections if isinstance(section, Section)]
        self._parameters = [one for section in graphed for one in section.parameters.values()]
        self._addresses = addresses(self._parameters)
        borders = {HIDDEN: slot.border(0, HIDDEN, example.hidden)}
        self._input = example.fixed(borders[HIDDEN].value)
        self._steps: list[_TrainedGraph | _TrainedEager] = []
        with memory.counted(), graph_safe_random_states() as generators:
            for place, section in enumerate(sections):
                if isinstance(section, Section):
                    slot.border(place + 1, HIDDEN, example.hidden)  # outside of the graph's memory
                    graph = _TrainedGraph(module, section, place, borders, self._input, slot, after_backward)
                    graph.record_forward(memory, generators)
                    self._steps.append(graph)
                else:
                    self._steps.append(_TrainedEager(section, place, borders, self._input, slot))
                borders = self._steps[-1].after
            for step in reversed(self._steps):
                if isinstance(step, _TrainedGraph):
                    step.record_backward(memory, generators)

    def fits(self) -> bool:
        """Return True if the parameters and their gradients are still where the graphs expect them."""
        return self._addresses == addresses(self._parameters)

    def run(self, given: LayerInput) -> Tensor:
        """Return the hidden state, [t(/tp), 1, h].

        In backward, `after_backward` is called with the parameters of each graph that has run.
        """
        assert not self._slot.in_use, "a slot holds one micro-batch"
        self._slot.in_use = True
        self._input.take(given)
        tensors = {HIDDEN: given.hidden}
        for step in self._steps:
            tensors = step.run(tensors)
        return tensors[HIDDEN]


class _TrainedGraph:
    """A section of trained layers as two graphs.

    What it reads and writes is at borders, which it shares with its neighbours.
    """

    def __init__(
        self,
        module: nn.Module,
        section: Section,
        place: int,  # of the section
        before: Mapping[str, Border],
        given: LayerInput,
        slot: Slot,
        after_backward: AfterBackward | None,
    ):
        self._module, self._section, self._place = module, section, place
        self._before, self._given, self._slot = before, given, slot
        self._after_backward = after_backward
        complete: list[nn.Parameter] = []
        self._stand_ins = {name: stand_in(one, complete) for name, one in section.parameters.items()}
        self._complete, self._in_order = complete, ()
        self._computed: tuple[Tensors, Tensors] | None = None  # input and output of a forward
        self.after: dict[str, Border] = {}

    def record_forward(self, memory: GraphMemory, generators: list[torch.Generator]) -> None:
        graph = recorded(self._compute, self._slot.pool, memory.stream, generators)
        self._forward = memory.noted(graph)

    def record_backward(self, memory: GraphMemory, generators: list[torch.Generator]) -> None:
        """Record the backward of what `record_forward` has made.

        All of that goes: other graphs of the slot may use its memory.
        """
        graph = recorded(self._differentiate, memory.scratch, memory.stream, generators)
        self._backward = memory.noted(graph)

    def run(self, tensors: Tensors) -> Tensors:
        outputs = _Replay.apply(self, *(tensors[name] for name in self._before))
        return dict(zip(self.after, outputs, strict=True))

    def replay_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the section hands on, in the slot's memory."""
        for border, tensor in zip(self._before.values(), tensors, strict=True):
            _put(border.value, tensor)
        self._forward.replay()
        return [border.value.detach() for border in self.after.values()]

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of what the section reads.

        In front of all sections they are in new tensors, else in the slot's memory.
        """
        for border, gradient in zip(self.after.values(), gradients, strict=True):
            if border.gradient is not None:
                _put(border.gradient, gradient)
        self._backward.replay()
        # As in a backward without graphs: all data-parallel processes start reductions in one order.
        self._in_order = self._in_order or tuple(self._complete)
        if self._after_backward is not None:
            self._after_backward(self._in_order)
        found = [border.gradient for border in self._before.values()]
        if self._place > 0:
            return [None if one is None else one.detach() for one in found]
        self._slot.in_use = False
        return [None if one is None else one.clone() for one in found]

    def _compute(self) -> None:
        inputs = {
            name: border.value.detach().requires_grad_(border.gradient is not None)
            for name, border in self._before.items()
        }
        with replaced(self._module, self._stand_ins):
            outputs = self._section.run(inputs, self._given)
        for name, output in outputs.items():
            self.after[name] = self._slot.border(self._place + 1, name, output)
            self.after[name].value.copy_(output.detach())
        self._computed = inputs, outputs

    def _differentiate(self) -> None:
        assert self._computed is not None, "a forward has been recorded"
        inputs, outputs = self._computed
        self._computed = None
        differentiable = [name for name, border in self.after.items() if border.gradient is not None]
        with replaced(self._module, self._stand_ins):
            torch.autograd.backward(
                [outputs[name] for name in differentiable],
                [self.after[name].gradient for name in differentiable],
            )
        for name, border in self._before.items():
            if border.gradient is not None:
                gradient = inputs[name].grad
                border.gradient.zero_() if gradient is None else border.gradient.copy_(gradient)


class _TrainedEager:
    """Work between two graphs of trained layers, with autograd."""

    def __init__(
        self, section: EagerSection, place: int, before: Mapping[str, Border], given: LayerInput, slot: Slot
    ):
        self._section, self._given = section, given
        made = {}
        for name, like in section.makes.items():
            example = before[like].value.detach().requires_grad_(before[like].gradient is not None)
            made[name] = slot.border(place + 1, name, example)
        self.after: dict[str, Border] = section.tensors_after(before) | made

    def run(self, tensors: Tensors) -> Tensors:
        return self._section.tensors_after(tensors) | self._section.run(tensors, self._given)


class _Replay(Function):
    """Replays a `_TrainedGraph`: tensors that it reads -> tensors that it hands on."""

    @staticmethod
    def forward(ctx: Any, graph: _TrainedGraph, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        outputs = graph.replay_forward(tensors)
        borders = graph.after.values()
        fixed = [one for one, border in zip(outputs, borders, strict=True) if border.gradient is None]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.replay_backward(gradients)


def _put(place: Tensor, tensor: Tensor) -> None:
    """Copy the tensor to the place, unless it is there."""
    if tensor.data_ptr() != place.data_ptr():
        place.copy_(tensor.detach())
