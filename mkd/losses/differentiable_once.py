"""Backward functions whose gradients cannot be differentiated again, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mkd.errors import UsageError


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function: a second derivative raises UsageError.

    torch's `once_differentiable` looks at the incoming gradient alone, which is a constant at the end of a
    loss. A penalty on the loss's gradient would then have no gradient, without a word.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph: nobody can ask for a second derivative
            return results
        results = results if isinstance(results, tuple) else (results,)
        return tuple(_Once.apply(one.detach().requires_grad_()) if _is_real(one) else one for one in results)

    return run


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _Once(torch.autograd.Function):
    """The same tensor; backward: an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        what = "the gradient of the loss cannot be differentiated again"
        why = "mkd computes it by formulas, which have no second derivative"
        do = "leave create_graph=True out, or compute this term from logits in plain torch"
        raise UsageError(what, why, do, code="exclude-each-other")
