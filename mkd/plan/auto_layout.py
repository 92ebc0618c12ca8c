"""`--pipeline-layout auto`: all layer splits chosen together, so that the slowest pipeline rank is as fast as possible.

A rank with s student and t teacher layers spends `s x student_ms + t x teacher_ms` on a micro-batch, the last one the heads
besides. The search finds the smallest possible largest time over ranks, then the most even counts among all splits within
`TIE` of it. The same search then splits a rank's layers over its virtual stages. It is exact for the student and one teacher,
the one with the slowest layers; layers of further teachers, slowest first, fill up what these leave, teacher by teacher.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mkd.errors import UsageError
from mkd.plan.cost import PairCost
from mkd.plan.layout import PipelineLayout

TIE = 0.02
"""Splits whose largest times differ by less than this proportion count as equal: rates are not known better, and even counts
spread memory evenly."""
_ROUNDING = 1e-9  # relative; sums of the same times in another order


@dataclass(frozen=True)
class Bin:
    """A part of the pipeline that gets layers of both models."""

    min_layers: int  # of each model
    fixed_ms: float = 0.0  # what it spends besides layers


def auto_layouts(
    cost: PairCost,
    student_layers: int,
    teacher_layers: Sequence[int],  # of each teacher
    pipeline_parallel: int,
    virtual_stages: int = 1,
) -> tuple[PipelineLayout, tuple[PipelineLayout, ...]]:
    """The layouts of the student and of each teacher.

    Every stage gets a layer of each model, but the first (it has the embedding) and the last (the heads) may have none.
    Raises UsageError when a model has too few layers for that.
    """
    counts = (student_layers, *teacher_layers)
    stages = pipeline_parallel * virtual_stages
    if min(counts) < stages - 2:
        taught = " and ".join(map(str, teacher_layers)) or "no"
        raise UsageError(
            f"pipeline-layout auto: models of {student_layers} (student) and {taught} (teacher) layers do "
            f"not fill {stages} pipeline stages",
            "every stage but the first and the last one needs a layer of each model",
            "use fewer pipeline stages",
            code="layers-fewer-than-stages",
        )
    bins = [
        Bin(min_layers=int(0 < stage < stages - 1), fixed_ms=cost.head_ms if stage == stages - 1 else 0.0)
        for stage in range(stages)
    ]
    ranks = [bins[rank::pipeline_parallel] for rank in range(pipeline_parallel)]
    layer_ms = (cost.student_ms, *cost.teacher_forward_ms)
    joined = [Bin(sum(one.min_layers for one in rank), sum(one.fixed_ms for one in rank)) for rank in ranks]
    of_ranks = balance_all(counts, layer_ms, joined)
    of_stages = [balance_all(totals, layer_ms, rank) for totals, rank in zip(of_ranks, ranks, strict=True)]
    in_order = [of_stages[stage % pipeline_parallel][stage // pipeline_parallel] for stage in range(stages)]
    student, *teachers = (
        PipelineLayout(layers, pipeline_parallel, virtual_stages) for layers in zip(*in_order, strict=True)
    )
    return student, tuple(teachers)


def balance_all(
    layers: Sequence[int],  # of the student and of each teacher, to be given out
    layer_ms: Sequence[float],  # of one layer of each
    bins: Sequence[Bin],
) -> list[tuple[int, ...]]:
    """Layers of each model in each bin: `balance` for the student and the slowest teacher, then for one teacher at a time."""
    first, *others = sorted(range(1, len(layers)), key=lambda model: -layer_ms[model]) or [None]
    columns: dict[int | None, tuple[int, ...]] = {}  # None: no model, a column of zeros
    for pair in [(0, first), *((other, None) for other in others)]:
        counts, times = (
            tuple(0 if model is None else of[model] for model in pair) for of in (layers, layer_ms)
        )
        split = balance(counts, times, bins)
        bins = [
            replace(one, fixed_ms=one.fixed_ms + _load(given, times))
            for one, given in zip(bins, split, strict=True)
        ]
        columns |= dict(zip(pair, zip(*split, strict=True), strict=True))
    return list(zip(*(columns[model] for model in range(len(layers))), strict=True))


def balance(
    layers: tuple[int, int],  # of student and teacher, to be given out
    layer_ms: tuple[float, float],  # of one layer of each; 0 for a model without layers
    bins: Sequence[Bin],
    tie: float = TIE,
) -> list[tuple[int, int]]:
    """(student layers, teacher layers) of each bin: the most even counts within `1 + tie` of the smallest largest time."""
    counts = [(student, teacher) for student in range(layers[0] + 1) for teacher in range(layers[1] + 1)]
    times = sorted(
        {fixed_ms + _load(count, layer_ms) for fixed_ms in {one.fixed_ms for one in bins} for count in counts}
    )
    total_ms = _load(layers, layer_ms) + sum(one.fixed_ms for one in bins)
    shortest = bisect_left(times, total_ms / len(bins) * (1 - _ROUNDING))
    index = bisect_left(
        range(len(times)), True, lo=shortest, key=lambda i: _fits(layers, layer_ms, bins, times[i])
    )
    return _most_even(layers, layer_ms, bins, times[index] * (1 + tie))


def _load(layers: tuple[int, int], layer_ms: tuple[float, float]) -> float:
    return layers[0] * layer_ms[0] + layers[1] * layer_ms[1]


def _fits(
    layers: tuple[int, int], layer_ms: tuple[float, float], bins: Sequence[Bin], limit_ms: float
) -> bool:
    """Whether all layers fit into bins of `limit_ms`.

    Dynamic programming over bins: for each number of student layers given out, the most teacher layers beside them.
    """
    most = {0: 0}
    for one in bins:
        following: dict[int, int] = {}
        for given, beside in most.items():
            for student in range(one.min_layers, layers[0] - given + 1):
                teacher = _room(one, student, layers[1], layer_ms, limit_ms)
                if teacher < (one.min_layers if layers[1] else 0):
                    break
                following[given + student] = max(following.get(given + student, -1), beside + teacher)
        most = following
    return most.get(layers[0], -1) >= layers[1]


def _room(one: Bin, student: int, most: int, layer_ms: tuple[float, float], limit_ms: float) -> int:
    """Teacher layers, at most `most`, that fit beside `student` layers in a bin; -1 when these alone do not fit."""
    free_ms = limit_ms * (1 + _ROUNDING) - one.fixed_ms - student * layer_ms[0]
    if free_ms < 0:
        return -1
    return min(most, int(free_ms / layer_ms[1])) if most else 0


def _most_even(
    layers: tuple[int, int], layer_ms: tuple[float, float], bins: Sequence[Bin], limit_ms: float
) -> list[tuple[int, int]]:
    """The split within `limit_ms` with the smallest squared distance to equal counts.

    Among equals, early bins get fewer student layers: they keep the activations of more micro-batches. Dijkstra's search over
    (bin, layers given out); bins may leave no more time unused than all layers together do.
    """
    spare_ms = (
        len(bins) * limit_ms * (1 + 2 * _ROUNDING)
        - _load(layers, layer_ms)
        - sum(one.fixed_ms for one in bins)
    )
    open_splits: list[tuple[int, list[tuple[int, int]], tuple[int, int], float]] = [(0, [], (0, 0), 0.0)]
    closed = set()
    while True:
        unevenness, chosen, given, unused_ms = heapq.heappop(open_splits)
        if (len(chosen), given) in closed:
            continue
        closed.add((len(chosen), given))
        if len(chosen) == len(bins):
            if given == layers:
                return chosen
            continue
        one = bins[len(chosen)]
        for student in range(one.min_layers, layers[0] - given[0] + 1):
            most = _room(one, student, layers[1] - given[1], layer_ms, limit_ms)
            for teacher in range(most, (one.min_layers if layers[1] else 0) - 1, -1):
                unused = unused_ms + limit_ms - one.fixed_ms - _load((student, teacher), layer_ms)
                if unused > spare_ms:
                    break
                distance = sum(
                    (len(bins) * n - total) ** 2 for n, total in zip((student, teacher), layers, strict=True)
                )
                state = (given[0] + student, given[1] + teacher)
                heapq.heappush(
                    open_splits, (unevenness + distance, [*chosen, (student, teacher)], state, unused)
                )
