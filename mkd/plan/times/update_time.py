"""The time of the optimizer's update: the bytes that it reads and writes, at the speed of a copy.

    zeros for the next gradient       4 bytes, for every parameter of the process
    norm of the gradient              4 bytes, for every parameter whose optimizer state it has
    clipping                          8, counted in every step: gradients are often longer than --clip-grad
    Adam                             28: gradient, fp32 weight and two moments, all but the first written too
    weights in bf16                   6, in bf16 runs
    average in a teacher             12 for each move, and its weights in bf16 like the student's

An H100 took 67 ms for 2.49 billion parameters and the addition of experts' gradients (layer_time.py). At its
memory's specified speed, 3.35 of the H200's 4.8 TB/s, the plan has 66.
"""

from __future__ import annotations

from collections.abc import Sequence

from mkd.plan.footprint.memory import GIB, RankMemory, state_bytes
from mkd.plan.times.layer_time import Rates, milliseconds

NORM, CLIP, ADAM, WEIGHTS, AVERAGE = 4, 8, 28, 6, 12


def update_ms(
    ranks: Sequence[RankMemory],  # with the optimizer's state on the device
    bf16: bool,
    clips: bool,
    rates: Rates | None = None,
    averages: float = 0.0,  # moves of averages in teachers
) -> float:
    """Return the time of an update on the slowest pipeline rank, without communication."""
    of_average = averages * (AVERAGE + WEIGHTS * bf16)
    each = (NORM + CLIP * clips + ADAM + WEIGHTS * bf16 + of_average) / state_bytes(bf16)
    moved_gib = max(rank.gradients_gib + each * rank.optimizer_gib for rank in ranks)
    return milliseconds(moved_gib * GIB, (rates or Rates()).copy)
