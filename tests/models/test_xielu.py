"""xIELU against the formula of transformers by autograd, in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import XIELUActivation

from mkd.models.xielu import _XIELU, BLOCK_ROWS


@pytest.mark.parametrize("rows", [1, BLOCK_ROWS + 3])
def test_values_and_gradients(rows):
    generator = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randn(rows, 1, 5, dtype=torch.float64, generator=generator)
    x[0, 0, :4] = torch.tensor([0.0, -1e-7, 1e-7, -40.0])
    theirs = XIELUActivation(dtype=torch.float64)
    theirs.alpha_p.data += 0.3
    inputs = [x.requires_grad_(), theirs.alpha_p, theirs.alpha_n]
    found = _XIELU.apply(*inputs, theirs.beta[None], theirs.eps[None])
    expected = theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((weight * one).sum(), inputs) for one in (found, expected)]
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
