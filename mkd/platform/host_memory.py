"""Page-locked host memory, which a GPU copies at full speed, and many tensors in one buffer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mkd.errors import UsageError

ALIGNMENT = 256  # bytes, as CUDA's own allocations; more than any kernel needs


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return [nbytes] uint8 on the host, uninitialised; page-locked if `device` is a GPU.

    Copies from page-locked memory are asynchronous. The memory is registered with CUDA rather than taken from
    torch's allocator of pinned memory, which rounds every size up to a power of two. Raises UsageError if the
    machine refuses to lock it.
    """
    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if device.type == "cuda" and nbytes:
        cuda, address = torch.cuda.cudart(), buffer.data_ptr()
        if cuda.cudaHostRegister(address, nbytes, 0) != cuda.cudaError.success:
            what = f"{nbytes / 2**30:.1f} GiB of host memory could not be page-locked"
            why = "weights or optimizer state that live on the host are copied from locked memory"
            do = "give the job more memory, raise its locked-memory limit (ulimit -l), or keep them on GPU"
            raise UsageError(what, why, do, code="host-memory-not-pinned")
        weakref.finalize(buffer.untyped_storage(), cuda.cudaHostUnregister, address).atexit = False
    return buffer


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a buffer that holds all `tensors`, one after another."""
    return sum(_span(tensor) for tensor in tensors)


def packed_views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `buffer`, uint8 of at least packed_bytes(tensors), shaped as `tensors`."""
    return list(_views(buffer, tensors))


def _views(buffer: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in tensors:
        yield buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _span(tensor)


def _span(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
