"""Passes of decoder layers as CUDA graphs, with the tensors that these read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from mkd.models.graphs.bounds import Bounds
from mkd.models.graphs.capture import captured, graph_safe_random_states
from mkd.models.packed import PackedDocuments, packed_documents


@dataclass(frozen=True)
class LayerInput:
    """Input of the layers of a part: one pack's hidden state, rotary angles and borders."""

    hidden: Tensor  # [t(/tp), 1, h]
    angles: Tensor | None  # see rope.py
    packed: PackedDocuments  # within bounds; see `bounds.filled`

    def fixed(self, hidden: Tensor) -> LayerInput:
        """Return a copy that graphs read, with `hidden` in the place of the hidden state."""
        borders = self.packed.cu_seqlens_q_padded.clone()
        packed = packed_documents(borders, borders, self.packed.max_seqlen_q, padding_joins_document=True)
        return LayerInput(hidden, None if self.angles is None else self.angles.clone(), packed)

    def take(self, other: LayerInput) -> None:
        """Copy the values of another pack with the same bounds."""
        self.hidden.detach().copy_(other.hidden.detach())
        if self.angles is not None:
            self.angles.copy_(other.angles)
        self.packed.cu_seqlens_q_padded.copy_(other.packed.cu_seqlens_q_padded)


Layers = Callable[[LayerInput], Tensor]  # -> [t(/tp), 1, h]


@dataclass(eq=False)
class GraphMemory:
    """Memory that the graphs of a process share. They run one after another, all on one stream.

    `scratch` holds what lives within one graph. What lives from the forward to the backward of a micro-batch
    is in a slot.
    """

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)  # captures, and never runs a graph
    scratch: Any = field(default_factory=torch.cuda.graph_pool_handle)
    slots: list[Slot] = field(default_factory=list)
    hidden: dict[torch.Size, Tensor] = field(default_factory=dict)  # before and after frozen layers, by shape
    kept_bytes: int = 0  # that torch has taken for graphs
    may_wait: bool = True  # False: messages to other pipeline ranks may be open, and the host must go on

    def free_slot(self, example: Tensor) -> Slot:
        """Return a slot for a hidden state like `example`, [t(/tp), 1, h], that is not in use."""
        fitting = (one for one in self.slots if not one.in_use and one.hidden.shape == example.shape)
        slot = next(fitting, None)
        if slot is None:
            self.slots.append(slot := Slot(example))
        return slot

    def hidden_like(self, example: Tensor) -> Tensor:
        """Return the tensor [t(/tp), 1, h] for hidden states like `example` of frozen layers."""
        if example.shape not in self.hidden:
            self.hidden[example.shape] = torch.empty_like(example)
        return self.hidden[example.shape]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the memory that captures in the block take. Unused memory is given back first."""
        if self.may_wait:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        yield
        self.kept_bytes += torch.cuda.memory_reserved() - before

    def drop(self, part: nn.Module) -> None:
        """Drop the graphs of a part, and slots that are empty then. Slots in use stay."""
        for slot in self.slots:
            if not slot.in_use:
                slot.passes = {key: one for key, one in slot.passes.items() if key[0] is not part}
        self.slots[:] = [slot for slot in self.slots if slot.in_use or slot.passes]

    def release(self) -> None:
        """Drop the slots and their graphs."""
        self.slots.clear()
        self.hidden.clear()


class ForwardPass:
    """The layers of a frozen model, without autograd."""

    def __init__(self, layers: Layers, example: LayerInput, memory: GraphMemory):
        hidden = memory.hidden_like(example.hidden)
        self._input, place = example.fixed(hidden), (memory.scratch, memory.stream)
        with (
            memory.counted(),
            graph_safe_random_states() as generators,
            captured(*place, generators) as self._graph,
        ):
            hidden.copy_(layers(self._input))

    def run(self, given: LayerInput) -> Tensor:
        """Return the hidden state, [t(/tp), 1, h], in a new tensor."""
        self._input.take(given)
        self._graph.replay()
        return self._input.hidden.clone()


class Slot:
    """Memory of one micro-batch between its forward and its backward, and the graphs that use it.

    The graphs are those of different model parts, and of packs with different bounds. Only one of them is
    between its forward and its backward.
    """

    def __init__(self, example: Tensor):  # [t(/tp), 1, h]
        self.pool = torch.cuda.graph_pool_handle()
        self.in_use = False
        self.passes: dict[tuple[nn.Module, Bounds], TrainingPass] = {}  # by part
        self.hidden, self.output, self.output_gradient, self.hidden_gradient = (
            torch.empty_like(example, requires_grad=False) for _ in range(4)
        )
        assert example.requires_grad, "the embedding is trained, so that backward reaches it"
        self.hidden.requires_grad_()


class TrainingPass:
    """Forward and backward of the layers of a model that is trained.

    Gradients of parameters are added to their `main_grad` inside the graph. The parameters' hooks do not run:
    the layers compute with stand-ins, which are over the same memory. (A gradient node belongs to the stream
    on which it was made; those of the parameters do not belong to the stream that captures.)
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Layers,  # calls `module`
        parameters: Mapping[str, nn.Parameter],  # those of `module` that are trained
        example: LayerInput,
        slot: Slot,
        memory: GraphMemory,
        after_backward: Callable[[], None] | None = None,
    ):
        self._slot, self._addresses, self._after_backward = slot, addresses(parameters), after_backward
        self._input = example.fixed(slot.hidden)
        stand_ins = {name: _stand_in(parameter) for name, parameter in parameters.items()}
        with memory.counted(), graph_safe_random_states() as generators, _replaced(module, stand_ins):
            with captured(slot.pool, memory.stream, generators) as self._forward:
                output = layers(self._input)
                slot.output.copy_(output.detach())
            with captured(memory.scratch, memory.stream, generators) as self._backward:
                output.backward(slot.output_gradient)
                slot.hidden_gradient.copy_(slot.hidden.grad)
        # What was made inside goes now: other graphs of the slot may use its memory.
        slot.hidden.grad = None

    def fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Return True if the parameters and their gradients are still where the graphs expect them."""
        return self._addresses == addresses(parameters)

    def run(self, given: LayerInput) -> Tensor:
        """Return the hidden state, [t(/tp), 1, h]. Its backward ends with a call of `after_backward`."""
        assert not self._slot.in_use, "a slot holds one micro-batch"
        return _Replay.apply(given.hidden, given, self)

    def replay_forward(self, given: LayerInput) -> Tensor:
        """Return the hidden state in the slot's memory."""
        self._slot.in_use = True
        self._input.take(given)
        self._forward.replay()
        return self._slot.output.detach()

    def replay_backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the hidden state in front of the layers, in a new tensor."""
        self._slot.output_gradient.copy_(gradient)
        self._backward.replay()
        self._slot.in_use = False
        if self._after_backward is not None:
            self._after_backward()
        return self._slot.hidden_gradient.clone()


class _Replay(Function):
    """[t(/tp), 1, h] -> [t(/tp), 1, h]: the layers of a `TrainingPass`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, given: LayerInput, layers: TrainingPass) -> Tensor:
        ctx.layers = layers
        return layers.replay_forward(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layers.replay_backward(gradient), None, None


def addresses(parameters: Mapping[str, nn.Parameter]) -> list[tuple[int, int]]:
    """Return where parameters and their main gradients are."""
    return [(one.data_ptr(), one.main_grad.data_ptr()) for one in parameters.values()]


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return a leaf over the memory of `parameter`, with its attributes, such as `main_grad`."""
    stand_in = nn.Parameter(parameter.detach())
    vars(stand_in).update(vars(parameter))
    stand_in.grad_added_to_main_grad = False
    stand_in.register_post_accumulate_grad_hook(_add_to_main)
    return stand_in


@contextmanager
def _replaced(module: nn.Module, stand_ins: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let `module` compute with `stand_ins`, by name of the parameter, inside the block."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in stand_ins]
    before = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), stand_in in zip(places, stand_ins.values(), strict=True):
            setattr(owner, name, stand_in)
        yield
    finally:
        for (owner, name), parameter in zip(places, before, strict=True):
            setattr(owner, name, parameter)


def _add_to_main(parameter: Tensor) -> None:
    """Add a gradient to `main_grad`, unless the product that made it has done so, and drop it at once.

    Autograd calls it in a thread of its own, on the stream that captures.
    """
    is_recorded = not parameter.is_cuda or torch.cuda.is_current_stream_capturing()
    assert is_recorded, "the graph would leave this gradient out"
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
