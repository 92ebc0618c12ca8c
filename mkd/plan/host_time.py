"""The time in which a CPU starts the kernels of a step. Predicted times of steps leave it out.

It varies by the machine, and shows only where it is longer than the kernels run. Figures are those of the
fastest and the slowest machine with H100s or H200s that was measured, in bf16 with Transformer Engine
(docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from mkd.config.schema import Config
from mkd.plan.layout import PipelineLayout

FORWARD_MS = {False: (1.4, 3.0), True: (1.9, 4.4)}
"""With tensor parallelism or without -> of one layer, (fastest, slowest)."""
TRAINING_MS = {False: (3.4, 7.0), True: (4.5, 10.2)}
"""The same for forward and backward."""


def kernel_start_ms(
    config: Config, student: PipelineLayout, teachers: Sequence[PipelineLayout], num_microbatches: int
) -> tuple[float, float]:
    """Return how long the CPU of the busiest pipeline rank starts kernels in a step, (fastest, slowest)."""
    is_divided = config.parallel.tensor_model_parallel_size > 1
    recomputes = config.training.recompute_granularity == "full"

    def rank_ms(rank: int, speed: int) -> float:
        forward, training = FORWARD_MS[is_divided][speed], TRAINING_MS[is_divided][speed]
        layer_ms = training + (forward if recomputes else 0.0)
        of_teachers = sum(sum(one.layers[rank :: one.pipeline_parallel]) for one in teachers)
        return sum(student.layers[rank :: student.pipeline_parallel]) * layer_ms + of_teachers * forward

    ranks = range(student.pipeline_parallel)
    fastest, slowest = (max(rank_ms(rank, speed) for rank in ranks) for speed in (0, 1))
    return num_microbatches * fastest, num_microbatches * slowest
