"""The number of rows in a block of the fused LM head, for the loss and the memory plan."""

from __future__ import annotations

# Bytes of one model's logits in a block on a GPU. Large enough that arithmetic bounds the products, not the
# traffic of the fp32 weight gradient. Yet small compared with the memory of a GPU that trains such a model.
GPU_BLOCK_BYTES = 5 * 2**29  # 2.5 GiB
SCORED_LOGIT_BYTES = 9  # of a logit without gradient: fp32, its exponential, and a mask
CPU_BLOCK_ROWS = 256  # two models' blocks of logits stay small


def head_block_rows(
    rows: int,  # rows with a loss, on this process
    columns: int,  # vocabulary rows of this process's shard of the head
    bytes_per_logit: int,
    on_gpu: bool = True,
) -> int:
    """Return the rows of a block: as few blocks as fit, of nearly equal size."""
    largest = max(1, GPU_BLOCK_BYTES // (columns * bytes_per_logit)) if on_gpu else CPU_BLOCK_ROWS
    blocks = max(1, -(-rows // largest))
    return max(1, -(-rows // blocks))
