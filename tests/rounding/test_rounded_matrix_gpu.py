"""Check that GPUs round to the same bits as the CPU."""

from __future__ import annotations

import pytest
import torch

from mkd.config.rounding_formats import Rounding
from mkd.rounding.rounded_inputs import round_inputs, token_peak
from mkd.rounding.rounded_matrix import round_in_place, shared_peak
from tests.rounding.plain_rounding import GROUPS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", GROUPS)
def test_weights_and_inputs_are_those_of_the_cpu(name):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(512, 1024, generator=generator) * torch.logspace(-4, 1, 512)[:, None]).bfloat16()
    rounding = Rounding(name, GROUPS[name])
    results = []
    for device in ("cpu", "cuda"):
        copy = weight.to(device, copy=True)
        round_in_place(copy, rounding, shared_peak(copy, rounding))
        results.append([copy.cpu()])
        if rounding.kind.inputs:
            x = weight.to(device)
            peak = token_peak(x) if name != "nvfp4" else torch.tensor([7.0], device=device)
            results[-1].append(round_inputs(x, name, peak).cpu())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
