"""The distance of sorted probabilities and its derivative."""

from __future__ import annotations

import pytest
import torch

from mkd.xtoken.published.dense_losses import sorted_l1


@pytest.mark.parametrize("widths", [(7, 7), (5, 9), (9, 5)])
def test_values_and_derivative(widths):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.rand(4, width, generator=generator, dtype=torch.float64) for width in widths)
    student.requires_grad_()
    size = max(widths)
    ordered = (p.sort(dim=1, descending=True).values for p in (student, teacher))
    padded = [torch.nn.functional.pad(p, (0, size - p.shape[1])) for p in ordered]
    wanted = (padded[0] - padded[1]).abs().sum(dim=1)
    wanted.sum().backward()
    values, signs = sorted_l1(student.detach(), teacher)
    torch.testing.assert_close(values, wanted.detach())
    assert torch.equal(signs, student.grad)


def test_equal_distributions_in_another_order_are_at_no_distance():
    values, signs = sorted_l1(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([[0.7, 0.2, 0.1, 0.0]]))
    assert values == 0
    assert (signs == 0).all()
