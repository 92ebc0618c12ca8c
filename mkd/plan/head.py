"""The number of rows that the fused LM head takes at a time, for the loss and the memory plan."""

from __future__ import annotations

# Logits of one model in a chunk on a GPU. So many that arithmetic bounds the products, not the traffic of the
# fp32 weight gradient; yet a small part of the memory of a GPU that trains such a model.
GPU_CHUNK_BYTES = 5 * 2**29  # 2.5 GiB
CPU_CHUNK_ROWS = 256  # both chunks of logits stay small


def head_chunk_rows(
    rows: int,  # with a loss, on this process
    columns: int,  # vocabulary rows of this process's shard of the head
    bytes_per_logit: int,
    on_gpu: bool = True,
) -> int:
    """Return the rows of a chunk: as few chunks as fit, of nearly equal size."""
    largest = max(1, GPU_CHUNK_BYTES // (columns * bytes_per_logit)) if on_gpu else CPU_CHUNK_ROWS
    chunks = max(1, -(-rows // largest))
    return max(1, -(-rows // chunks))
