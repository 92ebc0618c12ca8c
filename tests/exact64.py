"""Compute transformers' models in float64 throughout. By themselves they cast norms and routers to fp32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch


class _Torch64:
    """torch, in which `float32` means float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def exact_model(folder: Path) -> Iterator[torch.nn.Module]:
    """Yield the model of `folder` in float64. Run it inside the context; no cast reaches fp32 there."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    module = sys.modules[type(model).__module__]
    with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(module, "torch", _Torch64()):
        yield model
