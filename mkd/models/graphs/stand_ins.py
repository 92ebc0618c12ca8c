"""Leaves with which layers compute while a graph is recorded, in place of their parameters.

A gradient node belongs to the stream on which it was made; those of the parameters do not belong to the
stream that captures. The leaves are over the parameters' memory, and their gradients are added to `main_grad`
inside the graph. The parameters' hooks do not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def stand_in(parameter: nn.Parameter, complete: list[nn.Parameter]) -> nn.Parameter:
    """Return a leaf over the memory of `parameter`, with its attributes, such as `main_grad`.

    Backward appends `parameter` to `complete` when the gradient has been added.
    """
    leaf = nn.Parameter(parameter.detach())
    vars(leaf).update(vars(parameter))
    leaf.grad_added_to_main_grad = False
    leaf.register_post_accumulate_grad_hook(_add_to_main)
    leaf.register_post_accumulate_grad_hook(lambda _: complete.append(parameter))
    return leaf


def addresses(parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
    """Return where parameters and their main gradients are."""
    return [(one.data_ptr(), one.main_grad.data_ptr()) for one in parameters]


@contextmanager
def replaced(module: nn.Module, stand_ins: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let `module` compute with `stand_ins`, by name of the parameter, inside the block."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in stand_ins]
    before = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), leaf in zip(places, stand_ins.values(), strict=True):
            setattr(owner, name, leaf)
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
