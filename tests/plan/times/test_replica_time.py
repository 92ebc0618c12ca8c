"""Check the time of gradients and weights between replicas by hand, and the plan against measured steps."""

from __future__ import annotations

import pytest

from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import model_parameters
from tests.plan.shapes import MOE_STUDENT, STUDENT, TEACHER, config, qwen3
from tests.run_facts import forecast_of

SPREAD = "--use-distributed-optimizer"
PARAMETERS = model_parameters(STUDENT).total


def forecast(world_size: int, *flags, student: ModelShape = STUDENT, teachers=(TEACHER,)) -> Forecast:
    settings = config("--student-hf", "s", "--data-path", "d", "--train-iters", 1, *flags)
    return forecast_of(settings, world_size, student, teachers)


def test_replicas_sum_gradients_in_fp32():
    """An all-reduce of 4 bytes a parameter, or a reduce-scatter of them and an all-gather of 2 bytes."""
    assert forecast(1).replica_ms == 0
    summed, spread = forecast(8), forecast(8, SPREAD)
    assert summed.replica_ms == pytest.approx(PARAMETERS * 8 * 7 / 8 / 200e6, rel=1e-3)
    assert spread.replica_ms == pytest.approx(PARAMETERS * 6 * 7 / 8 / 200e6, rel=1e-3)
    text = f"update and {spread.replica_ms:.3g} ms of gradients and weights between replicas: "
    assert text in describe_forecast(spread)
    assert spread.planned_step_ms() == spread.pipeline_ms() + spread.replica_ms + spread.optimizer_ms


def test_work_beside_it_hides_it():
    assert forecast(8, SPREAD, "--overlap-grad-reduce", "--overlap-param-gather").replica_ms == 0
    reduced = forecast(8, SPREAD, "--overlap-grad-reduce").replica_ms
    assert reduced == pytest.approx(PARAMETERS * 2 * 7 / 8 / 200e6, rel=1e-3)


def test_experts_are_summed_by_those_that_have_the_same():
    """Over 8 of 16 processes: two on other machines, which share the links of both."""
    experts = forecast(16, SPREAD, "--expert-model-parallel-size", 8, student=MOE_STUDENT, teachers=())
    parameters = model_parameters(MOE_STUDENT)
    dense_ms = parameters.dense * 6 * 15 / 16 / 200e6
    assert experts.replica_ms == pytest.approx(dense_ms + parameters.experts / 8 * 6 / 2 / 45e6, rel=1e-3)


T4, T2 = (("--tensor-model-parallel-size", size, "--sequence-parallel") for size in (4, 2))
PEERS = ("--teacher-residency", "peers", "--teacher-peers")
FOUR = ("--seq-length", 4096, "--global-batch-size", 16)
QWEN3_6B = qwen3(30, 3584, 11776, 32, tied=False)


@pytest.mark.parametrize(
    "measured_ms, processes, student, flags",
    [
        (2343, 4, QWEN3_6B, (*FOUR, *T4)),
        (2202, 4, QWEN3_6B, (*FOUR, *T4, "--teacher-precision", "fp8")),
        (1691, 4, QWEN3_6B, (*FOUR, *PEERS, 4, SPREAD)),
        (1597, 4, QWEN3_6B, (*FOUR, *PEERS, 4, SPREAD, "--teacher-precision", "fp8")),
        (2011, 4, QWEN3_6B, (*FOUR, *T2, *PEERS, 2, SPREAD)),
        (1031, 2, STUDENT, ("--global-batch-size", 4, *T2)),
        (1654, 2, STUDENT, ("--global-batch-size", 8)),
        (1602, 1, STUDENT, ("--global-batch-size", 4)),
    ],
)
def test_measured_steps(measured_ms, processes, student, flags):
    """With CUDA graphs on H200s (docs/performance.md, docs/placement-measured.md)."""
    planned_ms = forecast(processes, *flags, student=student).planned_step_ms()
    assert planned_ms == pytest.approx(measured_ms, rel=0.04)
