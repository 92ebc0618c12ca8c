"""Memory of a GPU that torch does not allocate: CUDA's context, kernels, and NCCL's communicators.

Measured on one and two H200s, 2026-11-26, torch 2.11 and NCCL 2.28 without NVLink multicast
(docs/performance.md, "Memory outside torch"). Larger groups are assumed to take as much as those of two
processes, and groups of mkd's own as much as Megatron's.

Several processes make the communicators of all groups when they start. A process that is alone makes one at
the first message of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.plan.parallel_sizes import Sizes

CONTEXT_GIB = 0.6  # CUDA's context
KERNELS_GIB = 0.25  # of NCCL, torch and Transformer Engine
ALONE_GIB = 0.38  # communicator of a group of one process
SPREAD_GIB = 0.19  # of several, before its first message
MESSAGE_GIB = 0.28  # what the first message of several processes adds
PAIRS_GIB = 0.44  # what messages between two pipeline ranks add
BRIDGE_GIB = SPREAD_GIB + MESSAGE_GIB  # messages to a replica of another side; assumed, as of other groups
WORLD_GIB = 0.65  # the group of all processes, with messages


@dataclass(frozen=True)
class Groups:
    """Features that decide, beside the sizes, which groups there are and which have messages."""

    has_experts: bool = False  # the student's
    ties_embedding: bool = False  # its first and last stage sum the gradient
    spreads_optimizer: bool = False  # the gradient's norm is then a sum over all processes
    peers: Sequence[int] = ()  # processes that share layers of a teacher, for each group
    teacher_experts: Sequence[int] = ()  # processes that share experts, where not as the student's
    bridges: int = 0  # replicas of another side that the last stage sends hidden states to


def device_gib(sizes: Sizes, groups: Groups) -> float:
    """Return the GiB of one process, on the first pipeline rank. Others need about the same."""
    base = CONTEXT_GIB + KERNELS_GIB + groups.bridges * BRIDGE_GIB
    if sizes.stage * sizes.pipeline == 1:
        # Of all processes, with and without context parallelism of data, of pipelines, and for the norm.
        used = 5 + groups.has_experts * (1 if groups.spreads_optimizer else 2)
        return base + used * ALONE_GIB
    made = sizes.megatron_groups()
    for expert in groups.teacher_experts:
        made += [expert, 1, expert * sizes.pipeline, sizes.stage // expert]
    made += groups.peers
    spread = sum(size > 1 for size in made)
    messages = sum(size > 1 for size in _with_messages(sizes, groups))
    pairs = int(sizes.pipeline > 1)
    gib = base + WORLD_GIB + spread * SPREAD_GIB + (len(made) - spread) * ALONE_GIB
    return gib + messages * MESSAGE_GIB + pairs * PAIRS_GIB


def _with_messages(sizes: Sizes, groups: Groups) -> list[int]:
    """Return the sizes of the groups that a step sends messages in, that of all processes aside."""
    used = [*sizes.axes, sizes.copies]
    if groups.ties_embedding:
        used.append(min(2, sizes.pipeline))
    if groups.has_experts:
        used += [sizes.expert, sizes.expert_copies]
    if groups.spreads_optimizer:
        used.append(sizes.stage * sizes.pipeline)
    else:
        used.append(sizes.tensor * sizes.pipeline)
        used += [sizes.expert * sizes.pipeline] * groups.has_experts
    return [*used, *groups.peers, *groups.teacher_experts]
