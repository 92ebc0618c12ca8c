"""Check on a GPU that a capture that fails leaves no trace."""

from __future__ import annotations

import pytest
import torch

from mkd.models.graphs.capture import captured
from tests.ranks import skip_unless_gpus_take

pytestmark = pytest.mark.gpu


def test_random_numbers_after_a_capture_that_failed():
    """Work that waits for the device, which a capture does not allow."""
    skip_unless_gpus_take(1)
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")
    state, value = torch.cuda.get_rng_state(), torch.ones(3, device="cuda")
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    with pytest.raises(RuntimeError), captured(pool, stream, generators=[]):
        value.sum().item()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    with captured(torch.cuda.graph_pool_handle(), stream, generators=[]) as graph:
        value.add_(1)
    graph.replay()
    assert value.tolist() == [2, 2, 2]
