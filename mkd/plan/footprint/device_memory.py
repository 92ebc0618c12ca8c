"""Memory of a GPU that torch does not allocate: CUDA's context, kernels, and NCCL's communicators.

Measured with one and two H200s, torch 2.11 and NCCL 2.28 (docs/performance.md, "Memory outside torch").
Several processes make the communicators of all of Megatron's groups when they start. A process that is alone
makes one at the first message of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from mkd.plan.parallel_sizes import Sizes

CONTEXT_GIB = 0.6  # CUDA's context
KERNELS_GIB = 0.25  # of NCCL, torch and Transformer Engine
ALONE_GIB = 0.38  # communicator of a group of one process
SPREAD_GIB = 0.19  # of several, before its first message
MESSAGE_GIB = 0.28  # what the first message of several processes adds
PAIRS_GIB = 0.44  # messages between two pipeline ranks
WORLD_GIB = 0.65  # the group of all processes
OWN_GIB = SPREAD_GIB + MESSAGE_GIB  # a group of mkd's own
USED_ALONE = 5  # groups with messages if there is one process: all, and those of two sums and two norms


def device_gib(
    sizes: Sizes,
    has_experts: bool,
    ties_embedding: bool,
    own_groups: int,  # of mkd: for peers, and for teachers whose experts are spread otherwise
) -> float:
    """Return the GiB of one process."""
    base = CONTEXT_GIB + KERNELS_GIB
    if sizes.replica * sizes.data == 1:
        return base + USED_ALONE * ALONE_GIB
    spread = sum(size > 1 for size in _megatron_groups(sizes))
    alone = len(_megatron_groups(sizes)) - spread
    used = [sizes.tensor, sizes.pipeline, sizes.data, sizes.copies, sizes.tensor * sizes.pipeline]
    used += [sizes.pipeline] if ties_embedding else []
    used += [sizes.expert, sizes.expert_copies] if has_experts else []
    messages = sum(size > 1 for size in used) * MESSAGE_GIB + (sizes.pipeline > 1) * PAIRS_GIB
    return base + WORLD_GIB + spread * SPREAD_GIB + alone * ALONE_GIB + messages + own_groups * OWN_GIB


def _megatron_groups(sizes: Sizes) -> Sequence[int]:
    """Return the sizes of the groups that Megatron makes, on the first pipeline rank."""
    tensor, context, data, pipeline = sizes.tensor, sizes.context, sizes.data, sizes.pipeline
    dense = [tensor, context, data, sizes.copies, pipeline, tensor * pipeline]
    dense += [tensor * data, tensor * context, sizes.stage, sizes.stage * pipeline]
    ends = [min(2, pipeline), 1]  # ranks that share the embedding of tokens, and that of positions
    experts = [sizes.expert, 1, sizes.expert, sizes.expert * pipeline, sizes.expert_copies]
    return dense + ends + experts
