"""Check the collectives of tensor and context parallelism by hand: packs of 8,192 tokens in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.human import milliseconds
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.times.collectives import exchange_ms, gather_ms, replicas_gather_ms, split_widths
from mkd.plan.times.layer_time import WorkTime
from tests.plan.shapes import (
    DEEPSEEK_V3,
    MOE_STUDENT,
    QWEN3_5_9B,
    STUDENT,
    TEACHER,
    config,
    cost_of,
    qwen3,
    several,
)
from tests.run_facts import forecast_of

PAIR = 166e6  # bytes a ms between two GPUs
HIDDEN = 8192 * 2048 * 2  # bytes of the student's hidden states; the teacher's are twice as many
SEQUENCE = ("--sequence-parallel",)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)


def tensor(size: int) -> tuple[str, int]:
    return ("--tensor-model-parallel-size", size)


def costs(*flags, teachers=(TEACHER,), student=STUDENT):
    return cost_of(config(*flags), student, teachers, 1)


def test_bandwidth_of_a_machine_and_of_the_network():
    assert gather_ms(1e9, 1) == 0
    assert gather_ms(1e9, 2) == pytest.approx(1e9 / 2 / PAIR)
    assert gather_ms(1e9, 8) == pytest.approx(1e9 * 7 / 8 / 200e6)
    assert gather_ms(1e9, 16) == pytest.approx(1e9 * 15 / 16 / 45e6)


def test_replicas_of_a_machine_have_a_link_each():
    assert replicas_gather_ms(1e9, 8, 8) == gather_ms(1e9, 8)
    assert replicas_gather_ms(1e9, 16, 8) == pytest.approx(1e9 * 15 / 16 / 200e6)
    assert replicas_gather_ms(1e9, 16, 2) == pytest.approx(1e9 * 15 / 16 / 90e6)


@pytest.mark.parametrize("sequence", [(), SEQUENCE])
def test_forward_sums_two_outputs_in_a_layer(sequence):
    """Sequence parallelism gathers and scatters as many bytes as all-reduces move."""
    one, two = costs(), costs(*tensor(2), *sequence)
    reduce_ms = 2 * HIDDEN / 2 / PAIR
    for whole, half, sums_ms in zip(one.models, two.models, (2 * reduce_ms, 4 * reduce_ms), strict=True):
        assert half[0].forward_ms == pytest.approx(whole[0].forward_ms / 2 + sums_ms)
    teacher = two.teachers[0][0]
    assert teacher.collectives_ms == pytest.approx(4 * reduce_ms) and teacher.backward_ms == 0


@pytest.mark.parametrize("size", [2, 8])
def test_nothing_hides_sums_in_backward(size):
    """Two sums of an input's gradient, or six gathers and scatters, whatever is started beside them."""
    gather = HIDDEN * (size - 1) / size / (PAIR if size == 2 else 200e6)
    plain_ms = 2 * costs().student[0].forward_ms / size
    alone, shared = (costs(*tensor(size), *more).student[0] for more in ((), SEQUENCE))
    assert alone.backward_ms - plain_ms == pytest.approx(4 * gather)
    assert shared.backward_ms - plain_ms == pytest.approx(6 * gather)
    assert shared.collectives_ms == pytest.approx(10 * gather)


def test_recomputation_repeats_the_forward_s():
    plain, again = (costs(*tensor(2), *more).student[0] for more in ((), FULL))
    assert again.backward_ms - plain.backward_ms == pytest.approx(plain.forward_ms)
    assert again.collectives_ms - plain.collectives_ms == pytest.approx(4 * HIDDEN / 2 / PAIR)


def test_embedding_and_heads():
    """On one pass through the heads the student's states are summed once, or gathered and scattered."""
    gather = HIDDEN / 2 / PAIR
    alone, shared = (costs(*tensor(2), *more) for more in ((), SEQUENCE))
    of_pair = WorkTime(6 * gather, 0, collectives_ms=6 * gather)  # the teacher's are twice as wide
    assert alone.first == of_pair and alone.last.forward_ms == alone.head_ms
    assert alone.last.backward_ms == pytest.approx(2 * gather)
    assert shared.first == WorkTime(3 * gather, gather, collectives_ms=4 * gather)
    assert shared.last.forward_ms - shared.head_ms == pytest.approx(3 * gather)
    assert shared.last.backward_ms == pytest.approx(gather)
    several_passes = cost_of(several({}, {}), STUDENT, (TEACHER, TEACHER), 1)
    assert several_passes.first == several_passes.towers, "nothing is split"


def test_layers_with_experts_and_latent_attention():
    """Routed experts are whole; DeepSeek-V3's shared expert is split, and its attention gathers latents."""
    assert list(split_widths(MOE_STUDENT, MOE_STUDENT.layers[0])) == [2048]
    assert list(split_widths(DEEPSEEK_V3, DEEPSEEK_V3.layers[-1])) == [1536 + 512 + 64, 7168]
    assert list(split_widths(DEEPSEEK_V3, DEEPSEEK_V3.layers[0])) == [1536 + 512 + 64, 7168]
    layer = costs(*tensor(2), *SEQUENCE, student=MOE_STUDENT, teachers=()).student[0]
    gather = HIDDEN / 2 / PAIR
    assert layer.collectives_ms == pytest.approx(5 * gather)


def test_context_parallelism_counts_what_attention_does_not_hide():
    """8 groups of 2 x 128 channels go round: 3 sends of 2,048 tokens."""
    context = ("--context-parallel-size", 4)
    late = costs(*context).student[0]
    attention_ms = 2 * 2048 * 8 * 1024**2 / 460e9 / 4
    late_ms = 3 * (2048 * 8 * 256 * 2 / 350e6 - attention_ms / 4)
    assert late.forward_ms - costs().student[0].forward_ms / 4 == pytest.approx(late_ms)
    assert late.collectives_ms == pytest.approx(3 * late_ms)
    long = cost_of(config(*context), STUDENT, (), 1, document_length=8192).student[0]
    assert long.collectives_ms == 0


def test_mixers_exchange_rows_for_channels():
    """Half of the tokens leaves a process, of all channels behind and before the projections."""
    layers = costs("--context-parallel-size", 2, student=QWEN3_5_9B, teachers=()).student
    exchanged_ms = 16 * (2 * 128 + 4 * 128 + 4 + 2 * 128) * 4096 * 2 / 2 / 166e6
    assert layers[0].collectives_ms == pytest.approx(2 * exchanged_ms)
    assert list(split_widths(QWEN3_5_9B, QWEN3_5_9B.layers[0])) == [4096, 4096]


def test_windows_exchange_heads():
    """Queries, keys, values and outputs: 2 x (16 + 8) heads of 128 channels; three quarters leave."""
    gemma = qwen3(2, 2048, 6144, 16, tied=True)
    layers = tuple(replace(layer, sliding_window=512) for layer in gemma.layers)
    layer = costs("--context-parallel-size", 4, student=replace(gemma, layers=layers), teachers=()).student[0]
    assert layer.collectives_ms == pytest.approx(2 * 2048 * 2 * 24 * 128 * 2 * 3 / 4 / 166e6)


def test_a_plan_names_the_time_and_counts_it():
    def plan(*flags):
        settings = config("--student-hf", "s", "--data-path", "d", "--train-iters", 1, *flags)
        return forecast_of(settings, 2, STUDENT, [TEACHER])

    two, replicas = plan(*tensor(2), "--global-batch-size", 4), plan("--global-batch-size", 8)
    gather = HIDDEN / 2 / PAIR
    sums = 4 * 28 + 2 * (2 * 36) + 3 + 1  # layers, embeddings, and the gradient of the head's input
    assert two.collectives_ms() == pytest.approx(4 * sums * 2 * gather)
    assert two.step.step_ms == pytest.approx(replicas.step.step_ms / 2 + two.collectives_ms())
    spent = milliseconds(two.collectives_ms())
    text = f"parallel collectives that nothing hides: {spent} of a rank's step, share 0.2"
    assert text in describe_forecast(two) and two.figures()["collectives_ms"] == two.collectives_ms()
    assert "collectives" not in describe_forecast(replicas) and replicas.collectives_ms() == 0


def test_context_parallel_processes_send_their_tokens_only():
    """One document of 65,536 tokens hides what goes round."""
    flags = (*tensor(2), "--seq-length", 65_536, "--context-parallel-size")
    one, two = (cost_of(config(*flags, size), STUDENT, (TEACHER,), 1, 65_536) for size in (1, 2))
    assert two.teachers[0][0].collectives_ms == pytest.approx(one.teachers[0][0].collectives_ms / 2)
    assert two.first.total_ms == pytest.approx(one.first.total_ms / 2)


def test_selective_recomputation_repeats_what_its_part_sends():
    """Keys and values go round again for attention, hidden states are summed again for shared experts."""
    context, selective = ("--context-parallel-size", 4), ("--recompute-granularity", "selective")
    plain, again = (costs(*context, *more).student[0] for more in ((), selective))
    assert again.collectives_ms == pytest.approx(4 / 3 * plain.collectives_ms)
    assert plain.collectives_ms > 0
    experts = (*selective, "--recompute-modules", "moe")
    plain, again = (
        costs(*tensor(2), *SEQUENCE, *more, student=DEEPSEEK_V3, teachers=()).student[-1]
        for more in ((), experts)
    )
    sums_ms = 2 * gather_ms(8192 * 7168 * 2, 2)
    assert again.collectives_ms - plain.collectives_ms == pytest.approx(sums_ms)


def test_exchange_by_hand():
    """8,192 tokens x 8 experts of hidden size 2,048 in bf16 are 256 MiB.

    Over 8 processes 7/8 of it go through NVLink at 166 GB/s. Over 32 processes 24/32 go through the network
    at 45 GB/s, which takes longer than 7/32 through NVLink.
    """
    rows, volume = 8 * 8192, 2**28
    assert exchange_ms(rows, 2048, 2, expert_parallel=1) == 0
    assert exchange_ms(rows, 2048, 2, expert_parallel=8) == pytest.approx(volume * 7 / 8 / 166e6)
    assert exchange_ms(rows, 2048, 2, expert_parallel=32) == pytest.approx(volume * 24 / 32 / 45e6)
