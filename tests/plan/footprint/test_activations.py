"""Check the tensors that a micro-batch keeps against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.plan.footprint.activations import Activations
from mkd.plan.parallel_sizes import ONE_PROCESS, Sizes
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER, SEQ_LENGTH, STUDENT, config, student_activations

TP4 = ("--tensor-model-parallel-size", 4)


def test_a_layer_by_hand():
    """Bytes per token of a Qwen3-1.7B layer in bf16: h 2048, q 2048, k 1024, f 6144, 16 + 8 heads."""
    norms = 4 * 2 * 2048 + 2 * 4
    head_norms = 2 * (2048 + 1024) + 4 * 24
    attention = 2 * (2048 + 2 * 1024 + 2048) + 4 * 16
    mlp = 2 * 3 * 6144
    assert student_activations().layer_bytes(STUDENT.layers[0]) == SEQ_LENGTH * (
        norms + head_norms + attention + mlp
    )


def test_tensor_parallel_splits_all_but_norms_and_sequence_parallel_those_too():
    whole = student_activations()
    tensor, sequence = (student_activations(*TP4, *flags) for flags in ((), ("--sequence-parallel",)))
    hidden = SEQ_LENGTH * 2048 * 2
    rows = 2 * 4 * SEQ_LENGTH  # one fp32 value per row for both norms, on every process
    assert (
        tensor.layer_bytes(STUDENT.layers[0])
        == (whole.layer_bytes(STUDENT.layers[0]) - 4 * hidden - rows) / 4 + 4 * hidden + rows
    )
    assert sequence.layer_bytes(STUDENT.layers[0]) == (whole.layer_bytes(STUDENT.layers[0]) - rows) / 4 + rows


def moe_activations(*flags) -> Activations:
    settings = config("--expert-model-parallel-size", 8, *flags)
    return Activations(settings, MOE_STUDENT, 2, SEQ_LENGTH, Sizes.of(settings.parallel))


def test_a_layer_with_experts_by_hand():
    """Bytes per token of a Qwen3-30B-A3B layer: h 2048, q 4096, k 512, 8 of 128 experts of width 768.

    The norm keeps input and output. Each of the 8 rows of a token keeps the experts' input, input and output
    of the gated MLP, its weight and its places. The router keeps 13 bytes for every expert.
    """
    attention = 2 * (2 * 4096 + 2 * 512) + 4 * 32 + 2 * (4096 + 512) + 4 * 36
    norms = 4 * 2 * 2048 + 2 * 4
    rows, router = 8 * (2 * (2048 + 3 * 768) + 12), 13 * 128
    layer = MOE_STUDENT.layers[0]
    assert moe_activations().layer_bytes(layer) == SEQ_LENGTH * (attention + norms + rows + router)
    recomputed = moe_activations("--recompute-granularity", "selective", "--recompute-modules", "moe")
    assert recomputed.layer_bytes(layer) == SEQ_LENGTH * (attention + norms)
    again = recomputed.backward_bytes() - moe_activations().backward_bytes()
    assert again == SEQ_LENGTH * (rows + router)
    sequence = moe_activations("--tensor-model-parallel-size", 2, "--sequence-parallel")
    shared = SEQ_LENGTH * (rows + router + attention + 4 * 2 * 2048) // 2 + SEQ_LENGTH * 8
    assert sequence.layer_bytes(layer) == shared


def test_a_teacher_with_experts_holds_four_copies_of_its_rows():
    """Hidden size 4096 exceeds three times the width 1536 less its half: the exchange is the peak."""
    teacher = Activations(config(), MOE_TEACHER, 2, SEQ_LENGTH, ONE_PROCESS)
    hidden = SEQ_LENGTH * 4096 * 2
    assert teacher.forward_bytes() == 3 * hidden + 8 * 4 * hidden
    wide = replace(MOE_TEACHER.layers[0].moe, ffn_hidden_size=4096)
    layers = (replace(MOE_TEACHER.layers[0], moe=wide),)
    widest = Activations(config(), replace(MOE_TEACHER, layers=layers), 2, SEQ_LENGTH, ONE_PROCESS)
    assert widest.forward_bytes() == 3 * hidden + 8 * 5 * hidden


@pytest.mark.parametrize(
    ("flags", "layers", "inputs"),
    [
        (("uniform", "--recompute-num-layers", 1), 0, 28),
        (("uniform", "--recompute-num-layers", 3), 0, 10),
        (("block", "--recompute-num-layers", 20), 8, 20),
    ],
)
def test_recomputed_layers_keep_their_input(flags, layers, inputs):
    kept = student_activations("--recompute-granularity", "full", "--recompute-method", *flags)
    assert (
        kept.part_bytes(STUDENT.layers, is_last=False)
        == layers * kept.layer_bytes(STUDENT.layers[0]) + inputs * kept.hidden_bytes
    )
    assert kept.backward_bytes() > kept.layer_bytes(STUDENT.layers[0]) * (3 if flags[-1] == 3 else 1)


def test_selective_recomputation_saves_nothing_with_flash_attention():
    """Selective recomputation drops 64 bytes of statistics per token.

    It keeps q and k of the joint projection alive through v.
    """
    plain, selective = (
        student_activations(*flags).layer_bytes(STUDENT.layers[0])
        for flags in ((), ("--recompute-granularity", "selective"))
    )
    assert selective - plain == SEQ_LENGTH * (2 * (2048 + 1024) - 64)


def test_post_norms_keep_their_inputs():
    """Gemma 3 has two more norms: each keeps an input [t, h] in bf16 and a statistic in fp32."""
    plain = STUDENT.layers[0]
    more = student_activations().layer_bytes(replace(plain, post_norms=True))
    more -= student_activations().layer_bytes(plain)
    assert more == 2 * SEQ_LENGTH * (2 * STUDENT.hidden_size + 4)
