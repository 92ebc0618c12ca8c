"""Soft-capped logits, cap * tanh(z / cap), which stay between -cap and cap.

Source: Gemma 2 (2024), section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcap(product: Tensor, cap: float | None) -> Tensor:
    """Return the logits of the head's `product`, of any shape, which is overwritten. None: no cap."""
    return product if cap is None else product.div_(cap).tanh_().mul_(cap)


def softcap_and_tanh(product: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return logits, and tanh(z / cap) for `through_softcap`, both of the product's shape and dtype.

    The first may be overwritten. Without a cap they are the product and None.
    """
    if cap is None:
        return product, None
    tanh = product.div_(cap).tanh_()
    return tanh * cap, tanh


def through_softcap(gradient: Tensor, tanh: Tensor | None) -> Tensor:
    """Return the gradient of the head's product, given that of the logits: times 1 - tanh^2."""
    if tanh is None:
        return gradient
    return torch.ops.aten.tanh_backward(gradient.to(tanh.dtype), tanh).to(gradient.dtype)
