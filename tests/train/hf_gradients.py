"""Compute loss and gradients of the fixed global batch with transformers and plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.train.invariance import fixed_packs

RATIO, TEMPERATURE = 0.5, 2.0  # those of `Layout.argv`


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def backward_by_document(student: torch.nn.Module, teacher: torch.nn.Module) -> float:
    """Run the backward of the fixed packs, every document alone, and return the loss per loss token."""
    num_tokens = int(sum(pack.loss_mask.sum() for pack in fixed_packs(permuted=False)))
    total = 0.0
    for pack in fixed_packs(permuted=False):
        starts = pack.spans.cumsum() - pack.spans
        for start, length in zip(starts, pack.lengths, strict=True):
            columns = (pack.tokens, pack.labels, pack.loss_mask)
            ids, labels, mask = (torch.as_tensor(one[start : start + length]) for one in columns)
            logits = [model(ids.long()[None]).logits[0] for model in (student, teacher)]
            loss = (row_losses(*logits, labels.long()) * mask).sum() / num_tokens
            loss.backward()
            total += loss.item()
    return total


def reference_gradients(student_dir: Path, teacher_dir: Path, out_dir: Path) -> float:
    """Write the gradients as a Hugging Face folder, fp64, and return the loss per loss token.

    Every document runs alone, without padding. Both models have the same vocabulary.
    """
    student, teacher = load(student_dir), load(teacher_dir).requires_grad_(False)
    total = backward_by_document(student, teacher)
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return total


def row_losses(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every row, [t], from logits [t, v]."""
    ce = F.cross_entropy(student, labels, reduction="none")
    log_p, log_q = ((logits / TEMPERATURE).log_softmax(1) for logits in (teacher, student))
    kd = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    return (1 - RATIO) * ce + RATIO * TEMPERATURE**2 * kd
