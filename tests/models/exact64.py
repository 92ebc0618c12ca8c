"""Run models of transformers in float64 throughout, although parts of them cast to float32 by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

import torch


class _Float64Torch:
    """torch, with float64 under the names of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def in_float64(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield `model` in float64. Inside, the Python module of its class finds float64 under both names."""
    module: ModuleType = sys.modules[type(model).__module__]
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        stack.enter_context(patch.object(module, "torch", _Float64Torch()))
        yield model.double()
