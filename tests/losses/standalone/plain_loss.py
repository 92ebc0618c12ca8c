"""The distillation loss by torch's plain formulas and autograd, written without mkd's losses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def plain_logits(hidden: Tensor, weight: Tensor, bias=None, scale=1.0, logits_cap=None) -> Tensor:
    logits = functional.linear(hidden, weight, bias) * scale
    return logits if logits_cap is None else logits_cap * torch.tanh(logits / logits_cap)


def plain_divergence(name: str, parameter: float | None, teacher: Tensor, student: Tensor) -> Tensor:
    """Return the divergence of two logits over the last dimension."""
    t, s = teacher.softmax(-1), student.softmax(-1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum(-1)

    if name == "jsd":
        q = parameter * t + (1 - parameter) * s
        return parameter * kl(t, q) + (1 - parameter) * kl(s, q)
    return {
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "mixed_kl": lambda: parameter * kl(t, s) + (1 - parameter) * kl(s, t),
        "skewed_forward_kl": lambda: kl(t, parameter * t + (1 - parameter) * s),
        "skewed_reverse_kl": lambda: kl(s, (1 - parameter) * t + parameter * s),
    }[name]()


def plain_rows(
    student: Tensor,  # [..., v] logits
    teacher: Tensor,  # [..., v']
    targets: Tensor,  # [...] what each row predicts
    *,
    divergence: str = "forward_kl",
    parameter: float | None = None,
    kd_ratio: float = 0.5,
    temperature: float = 1.0,
    squared: bool = True,
) -> Tensor:
    """Return the loss of each row, [...]; labels of -100 give the cross entropy 0 there."""
    shared = min(student.shape[-1], teacher.shape[-1])
    hot = teacher[..., :shared] / temperature, student[..., :shared] / temperature
    kd = plain_divergence(divergence, parameter, *hot) * (temperature**2 if squared else 1.0)
    ce = functional.cross_entropy(student.flatten(0, -2), targets.flatten(), reduction="none")
    return (1 - kd_ratio) * ce.view(targets.shape) + kd_ratio * kd
