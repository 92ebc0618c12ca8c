"""Check many tensors in one buffer of host memory."""

from __future__ import annotations

import pytest
import torch

from mkd.platform.host_memory import ALIGNMENT, host_buffer, packed_bytes, packed_views

TENSORS = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.empty(0, 4), torch.arange(100), torch.randn(1)]


def test_views_do_not_overlap():
    buffer = host_buffer(packed_bytes(TENSORS), torch.device("cpu"))
    views = packed_views(buffer, TENSORS)
    for view, tensor in zip(views, TENSORS, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views, TENSORS, strict=True):
        assert view.dtype == tensor.dtype and torch.equal(view, tensor)
        assert view.untyped_storage().data_ptr() == buffer.data_ptr()
        assert not view.numel() or (view.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0


@pytest.mark.gpu
def test_memory_is_locked_while_it_lives():
    """The same addresses can be locked again after the first buffer; sizes are not rounded."""
    device = torch.device("cuda")
    for _ in range(3):
        buffer = host_buffer(3 * 2**28 + 5, device)
        assert buffer.is_pinned() and buffer.nbytes == 3 * 2**28 + 5
        buffer[:4].copy_(torch.arange(4, dtype=torch.uint8, device=device), non_blocking=True)
        torch.cuda.synchronize()
        assert buffer[:4].tolist() == [0, 1, 2, 3]
        del buffer
