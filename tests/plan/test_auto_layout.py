from __future__ import annotations

import math
import random
from itertools import product

import pytest

from mkd.errors import UsageError
from mkd.plan.auto_layout import TIE, Bin, auto_layouts, balance, balance_all
from mkd.plan.layout import PipelineLayout
from mkd.plan.times.bubble import simulate
from mkd.plan.times.cost import PairCost
from mkd.plan.times.layer_time import WorkTime
from tests.plan.shapes import STUDENT, TEACHER, config, cost_of, equal_layers, several


def splits(layers: int, bins: list[Bin]):
    """Yield every way to distribute `layers`, each bin with at least its minimum."""
    for counts in product(range(layers + 1), repeat=len(bins)):
        if sum(counts) == layers and (
            not layers or all(n >= b.min_layers for n, b in zip(counts, bins, strict=True))
        ):
            yield counts


def longest_ms(split, layer_ms, bins):
    return max(s * layer_ms[0] + t * layer_ms[1] + b.fixed_ms for (s, t), b in zip(split, bins, strict=True))


def unevenness(split):
    return sum((len(split) * n - sum(counts)) ** 2 for counts in zip(*split, strict=True) for n in counts)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("tie", [0.0, TIE])
def test_balance_equals_trying_everything(seed, tie):
    draw = random.Random(seed)
    bins = [Bin(draw.choice([0, 1]), draw.choice([0.0, 0.0, 2.5])) for _ in range(draw.randint(1, 4))]
    layers = (draw.randint(len(bins), 6), draw.choice([0, draw.randint(len(bins), 7)]))
    layer_ms = (
        draw.choice([1.0, 3.0, draw.random() + 0.1]),
        draw.choice([1.0, draw.random() + 0.1]) if layers[1] else 0.0,
    )
    candidates = [
        list(zip(*both, strict=True)) for both in product(splits(layers[0], bins), splits(layers[1], bins))
    ]
    best_ms = min(longest_ms(split, layer_ms, bins) for split in candidates)
    limit_ms = best_ms * (1 + tie) * (1 + 1e-9)
    found = balance(layers, layer_ms, bins, tie)
    assert found in candidates
    assert longest_ms(found, layer_ms, bins) <= limit_ms
    equal = [split for split in candidates if longest_ms(split, layer_ms, bins) <= limit_ms]
    assert unevenness(found) == min(map(unevenness, equal))


def test_equal_ranks_get_equal_counts():
    student, (teacher,) = auto_layouts(equal_layers(8, ((16, 4),), head_ms=0), pipeline_parallel=4)
    assert (student.layers, teacher.layers) == ((2, 2, 2, 2), (4, 4, 4, 4))
    student, (teacher,) = auto_layouts(
        equal_layers(8, ((16, 4),), head_ms=0), pipeline_parallel=2, virtual_stages=2
    )
    assert (student.layers, teacher.layers) == ((2, 2, 2, 2), (4, 4, 4, 4))


def test_the_last_rank_has_room_for_the_heads():
    """36 ms of layers and a 12 ms head on 4 ranks: 12 ms each is possible if the last has only the heads."""
    student, (teacher,) = auto_layouts(equal_layers(9, ((9, 1),), head_ms=12), pipeline_parallel=4)
    assert (student.layers, teacher.layers) == ((3, 3, 3, 0), (3, 3, 3, 0))


def test_among_equals_early_ranks_keep_fewer_layers():
    """Early ranks hold the activations of more micro-batches."""
    assert auto_layouts(equal_layers(5, (), head_ms=0), pipeline_parallel=2)[0].layers == (2, 3)


@pytest.mark.parametrize(("pipeline", "stages"), [(2, 1), (4, 1), (8, 1), (4, 2), (2, 4), (16, 1)])
def test_real_pair_keeps_every_layer_and_beats_even_splits(pipeline, stages):
    cost = cost_of(config(), STUDENT, (TEACHER,), pipeline * stages)
    student, (teacher,) = auto_layouts(cost, pipeline, stages)
    assert (sum(student.layers), sum(teacher.layers)) == (28, 36)
    assert 0 not in student.layers[1:-1] and 0 not in teacher.layers[1:-1]
    assert PipelineLayout.parse(",".join(map(str, teacher.layers)), 36, pipeline, stages) == teacher
    if 28 % (pipeline * stages) == 36 % (pipeline * stages) == 0:
        even = (PipelineLayout.even(28, pipeline, stages), PipelineLayout.even(36, pipeline, stages))
        auto_ms, even_ms = (
            simulate(cost.stage_times(pair[0], pair[1:]), pipeline, 4 * pipeline).step_ms
            for pair in ((student, teacher), even)
        )
        assert auto_ms < even_ms


def test_too_few_layers():
    with pytest.raises(UsageError) as caught:
        auto_layouts(equal_layers(5, ((36, 3),), head_ms=1), pipeline_parallel=8)
    assert caught.value.code == "layers-not-divisible" and caught.value.why and caught.value.do


def time_ms(split, layer_ms, one: Bin) -> float:
    return one.fixed_ms + sum(count * ms for count, ms in zip(split, layer_ms, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_layers_of_further_teachers_fill_up(seed):
    """A bin exceeds the mean by at most one layer per step of the search, plus the tie."""
    draw = random.Random(seed)
    bins = [Bin(int(0 < index < 3), 20.0 * (index == 3)) for index in range(4)]
    layers, layer_ms = [draw.randint(16, 40) for _ in range(4)], [draw.uniform(1, 5) for _ in range(4)]
    found = balance_all(layers, layer_ms, bins)
    assert [sum(counts) for counts in zip(*found, strict=True)] == layers
    assert all(min(split) >= one.min_layers for split, one in zip(found, bins, strict=True))
    times = [time_ms(split, layer_ms, one) for split, one in zip(found, bins, strict=True)]
    smallest = sorted(layer_ms[1:])[0]
    assert max(times) <= (sum(times) / 4 + smallest) * (1 + TIE)


@pytest.mark.parametrize(("pipeline", "stages"), [(2, 1), (4, 1), (4, 2)])
def test_three_models_beat_even_splits(pipeline, stages):
    cost = cost_of(several({}, {}), STUDENT, (TEACHER, STUDENT), pipeline * stages)
    student, teachers = auto_layouts(cost, pipeline, stages)
    assert [sum(layout.layers) for layout in (student, *teachers)] == [28, 36, 28]
    assert all(0 not in layout.layers[1:-1] for layout in (student, *teachers))
    if 28 % (pipeline * stages) == 36 % (pipeline * stages) == 0:
        even = [PipelineLayout.even(layers, pipeline, stages) for layers in (28, 36, 28)]
        auto_ms, even_ms = (
            simulate(cost.stage_times(one, others), pipeline, 4 * pipeline).step_ms
            for one, others in ((student, teachers), (even[0], even[1:]))
        )
        assert auto_ms < even_ms
    swapped = cost_of(several({}, {}), STUDENT, (STUDENT, TEACHER), pipeline * stages)
    assert auto_layouts(swapped, pipeline, stages) == (student, teachers[::-1])


def shortest_ms(layer_ms: list[float], stages: int, head_ms: float) -> float:
    """Return the shortest possible time of the slowest stage, by trying every first layer of every stage."""
    best = [0.0] + [math.inf] * len(layer_ms)
    for stage in range(stages):
        fixed_ms, least = head_ms * (stage == stages - 1), int(0 < stage < stages - 1)
        best = [
            min(
                (max(best[first], fixed_ms + sum(layer_ms[first:end])) for first in range(end - least + 1)),
                default=math.inf,
            )
            for end in range(len(layer_ms) + 1)
        ]
    return best[-1]


@pytest.mark.parametrize("seed", range(12))
def test_layers_of_different_cost_are_nearly_as_fast_as_the_best_split(seed):
    """Dense layers come first or anywhere, faster or slower than those with experts."""
    draw = random.Random(seed)
    pipeline, head_ms = draw.choice([2, 4, 8]), draw.choice([0.0, 3.0])
    number = draw.randint(2 * pipeline, 40)
    dense = draw.choice([{0, 1, 2}, set(draw.sample(range(number), number // 3))])
    times = [draw.uniform(0.3, 3), 1.0]
    layer_ms = [times[0] if index in dense else times[1] for index in range(number)]
    cost = PairCost(tuple(WorkTime(ms, 0.0) for ms in layer_ms), (), head_ms)
    (student, _) = auto_layouts(cost, pipeline)
    slowest_ms = max(time.total_ms for time in cost.stage_times(student, []))
    assert slowest_ms <= shortest_ms(layer_ms, pipeline, head_ms) * (1 + 2 * TIE)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_stage_of_fast_dense_layers_gets_more_of_them(stages):
    """The first 8 of 24 layers take a third of the others' time; the teacher's are equal."""
    layer_ms = [1.0] * 8 + [3.0] * 16
    teacher = (WorkTime(0.5, 0.0),) * 24
    cost = PairCost(tuple(WorkTime(0.0, ms) for ms in layer_ms), (teacher,), 0.0)
    student, (of_teacher,) = auto_layouts(cost, 2, stages)
    times = cost.stage_times(student, [of_teacher])
    ranks = [sum(time.total_ms for time in times[rank::2]) for rank in range(2)]
    assert max(ranks) <= sum(ranks) / 2 * (1 + TIE) and sum(student.layers) == sum(of_teacher.layers) == 24
    assert stages > 1 or student.layers[0] > student.layers[1]
