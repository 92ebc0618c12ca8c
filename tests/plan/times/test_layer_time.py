"""Check the time of layers with experts by hand: 4,096 tokens of Qwen3-30B-A3B and Qwen3-235B-A22B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.plan.times.collectives import exchange_ms, gather_ms
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER, config, cost_of, qwen3_moe

TOKENS = 4096
EP8 = ("--seq-length", TOKENS, "--expert-model-parallel-size", 8)
ATTENTION_MS = 2 * 32 * 128 * 4 * 1024**2 / 460e9  # 4 documents of 1,024 tokens
EXPERTS_MS = 2 * TOKENS * 2048 * (1.6 * 8 * 3 * 768 + 128) / 488e9  # 8 experts and the router
COUNTS_MS = 1.1  # the host waits for the sizes of the exchange
PROJECTIONS_MS = 2 * TOKENS * 2048 * 128 * 2 * (32 + 4) / 488e9
COPIES_MS = 8 * 8 * TOKENS * 2048 * 2 / 4.25e9
ADDITIONS_MS = 128 / 8 * 3 * 2048 * 768 * (2 + 4 + 4) / 4.25e9  # gradients in bf16 to buffers in fp32
EXCHANGE_MS = 2 * exchange_ms(8 * TOKENS, 2048, 2, 8)


def student_layer(*flags):
    """Return the time of the first layer of 48, without a pipeline."""
    return cost_of(config(*EP8, *flags), MOE_STUDENT, (), 1).student[0]


def test_forward_and_backward():
    layer = student_layer()
    compute_ms = PROJECTIONS_MS + EXPERTS_MS + ATTENTION_MS
    assert layer.forward_ms == pytest.approx(compute_ms + COPIES_MS + EXCHANGE_MS + COUNTS_MS)
    assert layer.backward_ms == pytest.approx(2 * compute_ms + COPIES_MS + EXCHANGE_MS + ADDITIONS_MS)
    assert layer.exchange_ms == pytest.approx(2 * EXCHANGE_MS)


@pytest.mark.parametrize(
    ("flags", "again_ms"),
    [
        (("selective", "--recompute-modules", "moe"), EXPERTS_MS + COPIES_MS + EXCHANGE_MS + COUNTS_MS),
        (
            ("full", "--recompute-method", "uniform", "--recompute-num-layers", 1),
            PROJECTIONS_MS + ATTENTION_MS + EXPERTS_MS + COPIES_MS + EXCHANGE_MS + COUNTS_MS,
        ),
    ],
)
def test_recomputation_exchanges_again(flags, again_ms):
    plain, again = student_layer(), student_layer("--recompute-granularity", *flags)
    assert again.backward_ms - plain.backward_ms == pytest.approx(again_ms)
    assert again.exchange_ms == pytest.approx(3 * EXCHANGE_MS)


def test_a_teacher_has_its_own_processes_and_no_backward():
    own = ("--teacher-expert-model-parallel-size", 2)
    following, alone = (
        cost_of(config(*EP8, *more), MOE_STUDENT, (MOE_TEACHER,), 1).teachers[0][0] for more in ((), own)
    )
    assert following.exchange_ms == pytest.approx(2 * exchange_ms(8 * TOKENS, 4096, 2, 8))
    assert alone.exchange_ms == pytest.approx(2 * exchange_ms(8 * TOKENS, 4096, 2, 2))
    assert following.forward_ms - alone.forward_ms == pytest.approx(following.exchange_ms - alone.exchange_ms)
    assert following.backward_ms == 0


def test_tensor_parallel_processes_share_rows():
    """Each sends and sorts half of the tokens' rows."""
    tensor = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
    one, two = student_layer(), student_layer(*tensor)
    own_ms = two.forward_ms - 2 * gather_ms(TOKENS * 2048 * 2, 2) - COUNTS_MS
    assert own_ms == pytest.approx((one.forward_ms - COUNTS_MS) / 2)


def test_dense_layers_have_their_own_time():
    mixed = qwen3_moe(4, 2048, 768, 32, mlp_only_layers=[0, 2])
    times = cost_of(config(*EP8), mixed, (), 1).student
    dense_ms = PROJECTIONS_MS + ATTENTION_MS + 2 * TOKENS * 2048 * 3 * 6144 / 488e9
    assert [one.forward_ms for one in times[::2]] == pytest.approx([dense_ms] * 2)
    assert times[1] == times[3] == replace(times[1], exchange_ms=2 * EXCHANGE_MS) != times[0]
    assert times[0].exchange_ms == 0
