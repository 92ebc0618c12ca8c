"""The time in which a CPU starts the kernels of a step. Predicted times of steps leave it out.

It varies by the machine, and shows only where it is longer than the kernels run. The figures are estimates
from the fastest and the slowest machine with H100s or H200s that was measured, in bf16 with Transformer
Engine (docs/performance.md). Dense layers alone count: experts, FP8, gathers of peers and vision towers take
longer.
"""

from __future__ import annotations

from mkd.plan.facts import RunFacts
from mkd.plan.layer_time import recomputed_share

FORWARD_MS = {False: (1.4, 3.1), True: (1.8, 5.1)}
"""Is there tensor parallelism -> milliseconds of one layer on the (fastest, slowest) machine."""
TRAINING_MS = {False: (3.4, 7.2), True: (4.4, 11.7)}
"""The same for forward and backward."""


def kernel_start_ms(facts: RunFacts) -> tuple[float, float]:
    """Return how many ms the busiest rank's CPU starts an update's kernels, (fastest, slowest)."""
    config, (student, teachers) = facts.config, facts.layouts
    is_divided = config.parallel.tensor_model_parallel_size > 1
    again = recomputed_share(config.training, sum(student.layers) / len(student.layers))

    def rank_ms(rank: int, speed: int) -> float:
        forward, training = FORWARD_MS[is_divided][speed], TRAINING_MS[is_divided][speed]
        of_teachers = sum(sum(one.layers[rank :: one.pipeline_parallel]) for one in teachers)
        of_student = sum(student.layers[rank :: student.pipeline_parallel])
        return of_student * (training + again * forward) + of_teachers * forward

    ranks = range(student.pipeline_parallel)
    fastest, slowest = (max(rank_ms(rank, speed) for rank in ranks) for speed in (0, 1))
    return facts.batch.num_microbatches * fastest, facts.batch.num_microbatches * slowest
