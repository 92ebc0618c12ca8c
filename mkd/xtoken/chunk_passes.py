"""The passes over logits of 1-1 chunks, chains and metrics: Triton on GPUs, else plain torch."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mkd.losses.rows import use_triton
from mkd.xtoken import chunk_torch_passes as torch_passes


def passes_for(logits: Tensor) -> ModuleType:
    """The module, `torch_passes` or one with the same functions, that runs on these logits."""
    if use_triton(logits):
        from mkd.xtoken import chunk_triton_passes as triton_passes

        return triton_passes
    return torch_passes
