"""Check the memory and the time of teachers whose experts are codes, and the notes on those that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.plan.advice.notes import plan_notes
from mkd.plan.advice.teacher_place import plan_places
from mkd.plan.footprint.activations import Activations
from mkd.plan.models.planned_teachers import Pair
from mkd.plan.parallel_sizes import ONE_PROCESS
from tests.plan.shapes import MOE_TEACHER, SEQ_LENGTH, STUDENT, config
from tests.run_facts import facts_of, forecast_of

LAYERS, EXPERTS, HIDDEN, WIDTH = 94, 128, 4096, 1536
MATRICES = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH
BLOCKS, MXFP4 = {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "mxfp4"}


def quantised(config_of: dict | None):
    return replace(MOE_TEACHER, hf_config={"quantization_config": config_of} if config_of else {})


def forecast(*flags, shape=MOE_TEACHER, world_size=8):
    given = "--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--bf16", *flags
    return forecast_of(config(*given), world_size, STUDENT, [shape])


def layer_bytes(*flags, shape=MOE_TEACHER):
    (teacher,) = forecast(*flags, shape=shape).facts.planned_teachers
    return sum(teacher.layer_bytes(layer, 2) for layer in shape.layers)


@pytest.mark.parametrize(
    ("flags", "stored", "expected"),
    [
        (("fp8",), None, MATRICES + 4 * LAYERS * EXPERTS * (2 * WIDTH + HIDDEN)),
        (("fp8", "--teacher-fp8-recipe", "blockwise"), None, MATRICES + 4 * MATRICES // 128**2),
        (("stored",), BLOCKS, MATRICES + 4 * MATRICES // 128**2),
        (("stored",), MXFP4, MATRICES // 2 + MATRICES // 32),
    ],
)
def test_experts_have_the_bytes_of_their_codes(flags, stored, expected):
    shape = quantised(stored)
    saved = layer_bytes(shape=shape) - layer_bytes("--teacher-precision", *flags, shape=shape)
    assert saved == 2 * MATRICES - expected


def test_decoded_matrices_are_in_the_peak_and_in_the_time():
    """A process has the first matrices of its experts in bf16. The plan moves 3 bytes for each weight."""
    activations = Activations(config(), MOE_TEACHER, 2, SEQ_LENGTH, ONE_PROCESS)
    rows = 8 * SEQ_LENGTH
    first = 2 * (rows * (HIDDEN + 2 * WIDTH) + EXPERTS * 2 * HIDDEN * WIDTH)
    hidden = 2 * SEQ_LENGTH * HIDDEN
    assert activations.forward_bytes(decodes=True) == 3 * hidden + first > activations.forward_bytes()
    shape = quantised(MXFP4)
    plain, stored = (forecast("--teacher-precision", one, shape=shape) for one in ("bf16", "stored"))
    more_ms = sum(one.forward_ms for one in layers(stored)) - sum(one.forward_ms for one in layers(plain))
    assert more_ms == pytest.approx(3 * MATRICES / 4.25e9, rel=1e-6)


def layers(forecast):
    from mkd.plan.times.cost import pair_cost

    pair: Pair = forecast.facts.pair
    (teacher,) = pair_cost(pair, 1).teachers
    return teacher


def test_places_of_a_teacher_with_experts():
    """Experts in FP8 are everywhere; they stay as they are stored only where they are stored so."""
    names = {one.place.name for one in plan_places(forecast())}
    assert {"device", "device, fp8", "host, fp8"} <= names and not any(
        "stored" in one for one in names if "," in one
    )
    stored = {one.place.name: one for one in plan_places(forecast(shape=quantised(MXFP4)))}
    assert stored["device, stored"].need_gib < stored["device, fp8"].need_gib < stored["device"].need_gib
    assert stored["device, fp8"].step_ms < stored["device"].step_ms < stored["device, stored"].step_ms


@pytest.mark.parametrize(
    ("flags", "stored", "expected"),
    [
        ((), None, None),
        ((), MXFP4, "stored as MXFP4 and dequantised while they are read; with precision stored they stay"),
        (("stored",), MXFP4, None),
        (("fp8",), BLOCKS, "stored as FP8 blocks and dequantised while they are read, and rounded again"),
        (("fp8", "--teacher-fp8-recipe", "blockwise"), BLOCKS, None),
        (
            (),
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "they cannot stay so, because its scales",
        ),
    ],
)
def test_notes_on_experts_that_are_dequantised(flags, stored, expected):
    flags = ("--teacher-precision", *flags) if flags else ()
    found = [
        note for note in plan_notes(forecast(*flags, shape=quantised(stored))) if "experts of the" in note
    ]
    assert len(found) == (expected is not None) and all(expected in note for note in found)


def test_facts_know_the_choice():
    settings = config("--student-hf", "s", "--teacher-precision", "stored", "--bf16")
    (teacher,) = facts_of(settings, 1, STUDENT, (quantised(BLOCKS),)).planned_teachers
    assert teacher.precision.decoded_bytes == 3 and teacher.product_time == 1
