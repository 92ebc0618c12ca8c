"""The hardware that plans assume: GPUs of a machine, and the bandwidth of the links between them."""

from __future__ import annotations

MACHINE = 8
"""GPUs of one machine."""

USABLE = 0.95
"""Proportion of a GPU's memory that a run can use; torch's allocator loses the rest to fragmentation."""

LINK_BYTES_PER_MS = 350e6
"""Bandwidth from a GPU to the others of its machine: NVLink 4, 450 GB/s as specified, about 350 in use."""

COLLECTIVE_BYTES_PER_MS = 200e6
"""Bus bandwidth of an all-reduce, all-gather or reduce-scatter of tens of MB between GPUs of a machine.

Measured in steps of four H200s with CUDA graphs and without NVLink multicast: 836 ms for 166 GB, and 807 ms
(docs/performance.md, "Four GPUs").
"""

PAIR_BYTES_PER_MS = 166e6
"""The same between two GPUs: 233 ms for 38.7 GB on H200s ("Tensor parallelism and the CPU")."""

EXCHANGE_BYTES_PER_MS = 166e6
"""The same in an all-to-all, waits for the other GPUs included.

Measured between two H200s: 146 in a step with packs of 4,096 tokens (44.2 ms for 6.44 GB), 190 with 8,192
(174 ms; docs/performance.md, "Four GPUs", and docs/moe.md).
"""

GATHER_BYTES_PER_MS = 145e6
"""Bandwidth at which a teacher's layers come from peers beside matrix products.

Measured on two H100s: 1.33 ms for the half of a Qwen3-8B-shaped layer, 193 MB.
"""

NETWORK_BYTES_PER_MS = 45e6
"""Bandwidth from a GPU to other machines: 50 GB/s (400 Gbit/s) as specified, about 45 in use."""

HOST_BYTES_PER_MS = 50e6
"""Bandwidth of page-locked memory over PCIe 5 x16: 63 GB/s as specified, about 50 in practice."""
