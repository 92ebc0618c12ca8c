"""The search of `--pipeline-layout auto` for the pipeline layouts of all models of a run.

The search chooses all layouts together and makes the slowest pipeline rank as fast as possible. A rank with s
student and t teacher layers spends `s x student_ms + t x teacher_ms` on a micro-batch; the last rank adds the
time of the heads. The search finds the smallest possible largest time over ranks, then the most even counts
among all splits within `TIE` of it. The same search then splits a rank's layers over its virtual stages.

The search is exact for the student and one teacher, the one with the slowest layers. Layers of further
teachers, slowest first, then fill up the rest, teacher by teacher. If the layers of a model differ (dense
ones beside ones with experts), the search takes their mean time, and a descent then moves layers between
stages as long as that makes the slowest rank faster.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, permutations, product

from mkd.errors import UsageError
from mkd.plan.layout import Layouts, PipelineLayout
from mkd.plan.times.cost import PairCost

TIE = 0.02
"""Splits whose largest times differ by less than this proportion count as equal.

Rates are not known more exactly, and even counts spread memory evenly.
"""
_ROUNDING = 1e-9  # relative; sums of the same times in another order


@dataclass(frozen=True)
class Bin:
    """A part of the pipeline that gets layers of all models."""

    min_layers: int  # of each model
    fixed_ms: float = 0.0  # time that it spends on other things than layers


def auto_layouts(cost: PairCost, pipeline_parallel: int, virtual_stages: int = 1) -> Layouts:
    """Choose the layouts of the student and of each teacher together.

    Every stage gets a layer of each model. The first stage (embedding) and the last one (heads) may have
    none. Raises UsageError when a model has too few layers for that.
    """
    counts = tuple(map(len, cost.models))
    stages = pipeline_parallel * virtual_stages
    if min(counts) < stages - 2:
        taught = " and ".join(map(str, counts[1:])) or "no"
        raise UsageError(
            f"pipeline-layout auto: models of {counts[0]} (student) and {taught} (teacher) layers do "
            f"not fill {stages} pipeline stages",
            "every stage but the first and the last one needs a layer of each model",
            "use fewer pipeline stages",
            code="layers-not-divisible",
        )
    bins = [
        Bin(
            min_layers=int(0 < stage < stages - 1),
            fixed_ms=cost.last.total_ms * (stage == stages - 1) + cost.first.total_ms * (stage == 0),
        )
        for stage in range(stages)
    ]
    times = [[layer.total_ms for layer in layers] for layers in cost.models]
    ranks = [bins[rank::pipeline_parallel] for rank in range(pipeline_parallel)]
    layer_ms = [sum(layers) / len(layers) for layers in times]
    joined = [Bin(sum(one.min_layers for one in rank), sum(one.fixed_ms for one in rank)) for rank in ranks]
    of_ranks = balance_all(counts, layer_ms, joined)
    of_stages = [balance_all(totals, layer_ms, rank) for totals, rank in zip(of_ranks, ranks, strict=True)]
    in_order = [of_stages[stage % pipeline_parallel][stage // pipeline_parallel] for stage in range(stages)]
    splits = list(zip(*in_order, strict=True))
    if any(len(set(layers)) > 1 for layers in times):
        splits = refine(splits, times, bins, pipeline_parallel)
    student, *teachers = (PipelineLayout(layers, pipeline_parallel, virtual_stages) for layers in splits)
    return Layouts(student, tuple(teachers))


def refine(
    splits: Sequence[tuple[int, ...]],  # layers of each model on each stage
    layer_ms: Sequence[Sequence[float]],  # time of each layer of each model
    bins: Sequence[Bin],  # stages
    pipeline_parallel: int,
) -> list[tuple[int, ...]]:
    """Move layers between stages until no move makes the slowest pipeline rank faster.

    A move takes a layer from one stage and gives one to another; the stages between them shift by a layer. It
    is of one model, or of two models in opposite directions. Ranks within `1 + TIE` of their mean are left.
    """
    sums = [list(accumulate(layers, initial=0.0)) for layers in layer_ms]

    def rank_ms(splits: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the time of each rank, longest first."""
        times = [one.fixed_ms for one in bins]
        for split, upto in zip(splits, sums, strict=True):
            ends = list(accumulate(split, initial=0))
            times = [
                ms + upto[end] - upto[start] for ms, (start, end) in zip(times, pairwise(ends), strict=True)
            ]
        ranks = (sum(times[rank::pipeline_parallel]) for rank in range(pipeline_parallel))
        return sorted((round(ms, 9) for ms in ranks), reverse=True)

    found, slowest_first = list(splits), rank_ms(splits)
    enough_ms = sum(slowest_first) / pipeline_parallel * (1 + TIE)
    while slowest_first[0] > enough_ms:
        better = ((rank_ms(moved), moved) for moved in _moves(found, bins))
        improved = next(((ms, moved) for ms, moved in better if ms < slowest_first), None)
        if improved is None:
            break
        slowest_first, found = improved
    return found


def _moves(splits: list[tuple[int, ...]], bins: Sequence[Bin]) -> Iterator[list[tuple[int, ...]]]:
    """Yield the splits that are one move away, those of one model first."""
    models = range(len(splits))
    stages = list(permutations(range(len(bins)), 2))
    for (source, target), model in product(stages, models):
        moved = _moved(splits, model, source, target, bins)
        if moved is not None:
            yield moved
    for (source, target), (model, other) in product(stages, permutations(models, 2)):
        moved = _moved(splits, model, source, target, bins)
        back = None if moved is None else _moved(moved, other, target, source, bins)
        if back is not None:
            yield back


def _moved(
    splits: list[tuple[int, ...]], model: int, source: int, target: int, bins: Sequence[Bin]
) -> list[tuple[int, ...]] | None:
    """Return the splits after a move; None if it empties a stage that needs a layer."""
    split = list(splits[model])
    if split[source] <= bins[source].min_layers:
        return None
    split[source] -= 1
    split[target] += 1
    return [*splits[:model], tuple(split), *splits[model + 1 :]]


def balance_all(
    layers: Sequence[int],  # of the student and of each teacher
    layer_ms: Sequence[float],  # of one layer of each
    bins: Sequence[Bin],
) -> list[tuple[int, ...]]:
    """Return each model's layers in each bin. `balance` places the student and the slowest teacher first."""
    slowest_first = sorted(range(1, len(layers)), key=lambda model: -layer_ms[model])
    columns: dict[int | None, tuple[int, ...]] = {}  # None: no model, a column of zeros
    pairs: list[tuple[int, int | None]] = [(0, slowest_first[0] if slowest_first else None)]
    pairs += [(teacher, None) for teacher in slowest_first[1:]]
    for model, beside in pairs:
        counts = layers[model], 0 if beside is None else layers[beside]
        times = layer_ms[model], 0.0 if beside is None else layer_ms[beside]
        split = balance(counts, times, bins)
        filled = zip(bins, split, strict=True)
        bins = [replace(one, fixed_ms=one.fixed_ms + _load(given, times)) for one, given in filled]
        columns |= dict(zip((model, beside), zip(*split, strict=True), strict=True))
    return list(zip(*(columns[model] for model in range(len(layers))), strict=True))


def balance(
    layers: tuple[int, int],  # of student and teacher
    layer_ms: tuple[float, float],  # of one layer of each; 0 for a model without layers
    bins: Sequence[Bin],
    tie: float = TIE,
) -> list[tuple[int, int]]:
    """Return (student layers, teacher layers) of each bin, most even within `1 + tie` of the best time."""
    counts = [(student, teacher) for student in range(layers[0] + 1) for teacher in range(layers[1] + 1)]
    fixed = {one.fixed_ms for one in bins}
    times = sorted({fixed_ms + _load(count, layer_ms) for fixed_ms in fixed for count in counts})
    total_ms = _load(layers, layer_ms) + sum(one.fixed_ms for one in bins)
    shortest = bisect_left(times, total_ms / len(bins) * (1 - _ROUNDING))
    index = bisect_left(times, True, lo=shortest, key=partial(_fits, layers, layer_ms, bins))
    return _most_even(layers, layer_ms, bins, times[index] * (1 + tie))


def _load(layers: tuple[int, int], layer_ms: tuple[float, float]) -> float:
    return layers[0] * layer_ms[0] + layers[1] * layer_ms[1]


def _fits(
    layers: tuple[int, int], layer_ms: tuple[float, float], bins: Sequence[Bin], limit_ms: float
) -> bool:
    """Return True if all layers fit into bins of `limit_ms`, by dynamic programming over bins."""
    most = {0: 0}  # student layers placed so far -> the most teacher layers that fit beside them
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
    """Return how many teacher layers fit beside `student` layers in a bin; -1 if these alone do not fit."""
    free_ms = limit_ms * (1 + _ROUNDING) - one.fixed_ms - student * layer_ms[0]
    if free_ms < 0:
        return -1
    return min(most, int(free_ms / layer_ms[1])) if most else 0


def _most_even(
    layers: tuple[int, int], layer_ms: tuple[float, float], bins: Sequence[Bin], limit_ms: float
) -> list[tuple[int, int]]:
    """Return the split within `limit_ms` with the smallest squared distance to equal counts.

    Among equals, early bins get fewer student layers, because they keep the activations of more
    micro-batches. This is Dijkstra's search over (bin, layers placed so far). All bins together may leave
    `spare_ms` unused: their time less that of all layers.
    """
    used_ms = _load(layers, layer_ms) + sum(one.fixed_ms for one in bins)
    spare_ms = len(bins) * limit_ms * (1 + 2 * _ROUNDING) - used_ms
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
                counts = student, teacher
                distance = sum((len(bins) * n - total) ** 2 for n, total in zip(counts, layers, strict=True))
                state = (given[0] + student, given[1] + teacher)
                heapq.heappush(open_splits, (unevenness + distance, [*chosen, counts], state, unused))
