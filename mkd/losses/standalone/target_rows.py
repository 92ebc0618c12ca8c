"""Which rows have a loss, what they are to predict, and by what their sum is divided."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.errors import UsageError


class TargetRows(NamedTuple):
    """Targets of the rows of hidden states or logits."""

    labels: Tensor  # [t] int64, any value where the mask is 0
    mask: Tensor  # [t] fp32, weight of each row
    has_labels: bool


def target_rows(
    rows: torch.Size,  # shape of the rows: [batch, sequence], or [t]
    device: torch.device,
    labels: Tensor | None,  # of that shape: the tokens themselves, row i predicts labels[..., i + 1]
    shift_labels: Tensor | None,  # of that shape: what each row predicts
    loss_mask: Tensor | None,  # of that shape: weights of `labels` or of `shift_labels`
    ignore_index: int,
    *,
    needs_labels: bool,
) -> TargetRows:
    """Return the targets of all rows. Raises UsageError for labels that are missing or of another shape."""
    if labels is not None and shift_labels is not None:
        raise UsageError(
            "both labels and shift_labels are given",
            "labels are shifted by one place, shift_labels are what each row predicts",
            "give one of them",
            code="exclude-each-other",
        )
    if needs_labels and labels is None and shift_labels is None:
        raise UsageError(
            "the loss has a cross entropy and no labels",
            "kd_ratio is below 1, or with_ce_metric is set",
            "give labels (the tokens) or shift_labels (what each row predicts), or set kd_ratio to 1",
            code="add-flag",
        )
    for name, tensor in (("labels", labels), ("shift_labels", shift_labels), ("loss_mask", loss_mask)):
        if tensor is not None and tensor.shape != rows:
            raise UsageError(
                f"{name} has the shape {tuple(tensor.shape)}, the rows have {tuple(rows)}",
                "each row has one label and one weight",
                "give tensors of the same batch, without the last dimension",
                code="numbers-contradict",
            )
    mask = torch.ones(rows, device=device) if loss_mask is None else loss_mask.to(device, torch.float32)
    if labels is not None:
        shift_labels, mask = _next(labels, ignore_index), _next(mask, 0.0)
    if shift_labels is None:
        return TargetRows(torch.zeros(rows.numel(), dtype=torch.int64, device=device), mask.flatten(), False)
    shift_labels = shift_labels.to(device).flatten()
    mask = torch.where(shift_labels == ignore_index, 0.0, mask.flatten())
    return TargetRows(shift_labels, mask, True)


def require_labels(chosen: Tensor, vocab_size: int) -> None:
    """Raise UsageError if a label of a row with a loss is no id of the student. Waits for the device."""
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < vocab_size:
        found = int(chosen.min()) if int(chosen.min()) < 0 else int(chosen.max())
        raise UsageError(
            f"the label {found} is not an id of the student, which has {vocab_size}",
            "its probability is not defined",
            "give such rows ignore_index or weight 0, or set ignore_index to this number",
            code="numbers-contradict",
        )


def _next(values: Tensor, last: float) -> Tensor:
    """Return the value of the next place, `last` at the end."""
    return torch.nn.functional.pad(values[..., 1:], (0, 1), value=last)


def denominator(mask: Tensor, reduction: str, num_items_in_batch: Tensor | int | None) -> Tensor | None:
    """Return what the sum is divided by, 0-dim, at least 1; None to divide by nothing.

    Without `num_items_in_batch` the mean is over the rows whose mask is not 0.
    """
    if reduction != "mean":
        if num_items_in_batch is not None:
            raise UsageError(
                f"num_items_in_batch is given with reduction {reduction!r}",
                "it is the denominator of a mean",
                "set reduction to 'mean', or leave it out",
                code="exclude-each-other",
            )
        return None
    if num_items_in_batch is None:
        return torch.count_nonzero(mask).clamp(min=1)
    return torch.as_tensor(num_items_in_batch, device=mask.device).flatten()[0].clamp(min=1)
