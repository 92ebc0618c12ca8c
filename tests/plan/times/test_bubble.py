from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from mkd.plan.times.bubble import SIMULATED, Task, balanced_bubble, makespan_ms, rank_order, simulate
from mkd.plan.times.layer_time import WorkTime


@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_equal_stages_wait_as_the_formula_says(pipeline, stages, rounds):
    microbatches = rounds * pipeline
    if pipeline == 1:
        stages = 1
    step = simulate([WorkTime(3.0, 5.0)] * pipeline * stages, pipeline, microbatches)
    assert step.bubble == pytest.approx(balanced_bubble(pipeline, microbatches, stages), abs=1e-12)
    assert step.ideal_ms == pytest.approx(8 * stages * microbatches)
    assert step.ratio == pytest.approx(1 / (1 - step.bubble))


def test_formula():
    assert balanced_bubble(4, 8) == 3 / 11
    assert balanced_bubble(4, 8, 2) == 3 / 19
    assert balanced_bubble(1, 8) == 0


def test_two_unequal_stages_by_hand():
    """Stage 0: F0 0-1, F1 1-2, B0 8-10, B1 15-17. Stage 1: F0 1-4, B0 4-8, F1 8-11, B1 11-15."""
    step = simulate([WorkTime(1, 2), WorkTime(3, 4)], 2, 2)
    assert step.step_ms == 17
    assert step.ideal_ms == 10
    assert step.bubble == pytest.approx(7 / 17)


def test_a_heavy_first_stage_by_hand():
    """Stage 0: F0 0-4, F1 4-8, B0 8-12, F2 12-16, B1 16-20, B2 20-24.

    Stage 1 follows: 4-5, 5-6, 8-9, 9-10, 16-17, 17-18.
    """
    step = simulate([WorkTime(4, 4), WorkTime(1, 1)], 2, 3)
    assert step.step_ms == 24
    assert step.ideal_ms == 15


def test_interleaved_by_hand():
    """2 ranks x 2 model parts of 1 + 2 ms, 2 micro-batches: 12 ms of work a rank, 3 ms to fill and drain."""
    assert simulate([WorkTime(1, 2)] * 4, 2, 2).step_ms == 15


@pytest.mark.parametrize(("pipeline", "stages"), [(1, 1), (2, 1), (4, 1), (4, 3), (8, 2)])
def test_a_long_step_goes_on_as_it_began(pipeline, stages):
    """Compare with the full simulation, for stages that differ by up to a half and thrice `SIMULATED`."""
    times = random.Random(7)
    chunks = [WorkTime(times.uniform(1, 1.5), times.uniform(2, 3)) for _ in range(pipeline * stages)]
    number = 3 * SIMULATED * pipeline
    assert simulate(chunks, pipeline, number).step_ms == pytest.approx(
        makespan_ms(chunks, pipeline, number), rel=1e-4
    )


def test_any_number_of_micro_batches_is_simulated_at_once():
    stages, number = [WorkTime(1, 2)] * 16, 10**12
    assert simulate(stages, 16, number).step_ms == pytest.approx(3 * (number + 15), rel=0, abs=1)


def test_a_rank_that_is_hardly_slower_tells_in_a_long_step():
    """The first rank's work is the longest path only after some 700 micro-batches."""
    stages, number = [WorkTime(10.01, 20.02), WorkTime(10, 20)], 10_000
    assert simulate(stages, 2, number).step_ms == pytest.approx(makespan_ms(stages, 2, number), rel=1e-4)


def test_fewer_micro_batches_than_stages():
    """One micro-batch goes through all stages and back."""
    assert simulate([WorkTime(1, 2), WorkTime(3, 4), WorkTime(5, 6)], 3, 1).step_ms == 21


def test_order_of_the_first_of_three_ranks():
    order = rank_order(0, 3, 1, 4)
    assert [(task.is_forward, task.microbatch) for task in order] == [
        (True, 0),
        (True, 1),
        (True, 2),
        (False, 0),
        (True, 3),
        (False, 1),
        (False, 2),
        (False, 3),
    ]
    assert rank_order(2, 3, 1, 2) == [
        Task(True, 0, 0),
        Task(False, 0, 0),
        Task(True, 1, 0),
        Task(False, 1, 0),
    ]


@pytest.mark.parametrize(
    ("pipeline", "stages", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 7), (4, 1, 6)]
)
def test_order_is_megatrons(pipeline, stages, microbatches):
    """The forwards have the same order, and as many come before the first backward."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    group = pipeline if stages > 1 else microbatches
    for rank in range(pipeline):
        pp_group = SimpleNamespace(size=lambda: pipeline, rank=lambda rank=rank: rank)
        virtual = stages if stages > 1 else None
        communicator = SimpleNamespace(pp_group=pp_group, virtual_pipeline_model_parallel_size=virtual)
        _, _, warmup, _ = get_pp_rank_microbatches(microbatches, stages, group, p2p_communicator=communicator)
        order = rank_order(rank, pipeline, stages, microbatches)
        table = get_schedule_table(microbatches, stages, group)
        assert [(task.microbatch, task.virtual_stage) for task in order if task.is_forward] == table
        backward = [
            (task.microbatch, stages - 1 - task.virtual_stage) for task in order if not task.is_forward
        ]
        assert backward == table
        before = next(i for i, task in enumerate(order) if not task.is_forward)
        assert before == min(warmup + 1, len(table))
