"""The time in which the replicas of the student exchange gradients and weights, once in each update.

A distributed optimizer reduce-scatters gradients in fp32 and all-gathers weights, others all-reduce the
gradients. With --overlap-grad-reduce they go beside the backward of the last micro-batch, with
--overlap-param-gather beside the forward of the first one: only what is longer counts.

Four H200s took 1,691 ms for a step with a student of 6.0 billion parameters, of which the plan has 1,556 ms
without this time and 1,692 with it (docs/performance.md, "Four GPUs").
"""

from __future__ import annotations

from collections.abc import Sequence

from mkd.plan.facts import RunFacts
from mkd.plan.footprint.memory import learned_parameters
from mkd.plan.times.collectives import replicas_gather_ms
from mkd.plan.times.hardware import MACHINE
from mkd.plan.times.layer_time import WorkTime

GRADIENT_BYTES = 4


def replica_ms(
    facts: RunFacts,
    ranks: Sequence[WorkTime],  # the student's micro-batch on each pipeline rank
) -> float:
    """Return the time on the slowest pipeline rank that nothing hides."""
    sizes, parallel = facts.sizes, facts.config.parallel
    experts = facts.pair.sizes.expert
    weight_bytes = 2 if facts.config.training.bf16 else 4
    spread = parallel.use_distributed_optimizer
    most = 0.0
    for learned, work in zip(learned_parameters(facts), ranks, strict=True):
        parts = [
            (learned.dense, sizes.copies, MACHINE // sizes.tensor),
            (learned.experts, sizes.stage // experts, MACHINE // experts),
        ]

        def gather_ms(width: int, parts: list[tuple[int, int, int]] = parts) -> float:
            return sum(
                replicas_gather_ms(number * width, copies, max(1, on_machine))
                for number, copies, on_machine in parts
            )

        gradients_ms = gather_ms(GRADIENT_BYTES) * (1 if spread else 2)
        weights_ms = gather_ms(weight_bytes) if spread else 0.0
        late_ms = max(0.0, gradients_ms - work.backward_ms * parallel.overlap_grad_reduce)
        most = max(most, late_ms + max(0.0, weights_ms - work.forward_ms * parallel.overlap_param_gather))
    return most
