"""Check the places of a teacher's weights against plans of the same flags, and which place is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.families.layer_shape import MLAShape
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.advice.teacher_place import PlannedPlace, choose, describe_places, plan_places
from mkd.plan.advice.verdict import fullest_rank
from mkd.plan.forecast import Forecast
from tests.plan.shapes import MOE_TEACHER, STUDENT, TEACHER, config, several
from tests.run_facts import forecast_of

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1)
PEERS = ("--teacher-residency", "peers", "--teacher-peers")
STORED = "stored hidden states", "stored top-k"
PLACES = "device", "2 peers", "4 peers", "8 peers", "host"


def forecast(world_size: int, *argv: str | int, teachers=(TEACHER,), heads=()) -> Forecast:
    return forecast_of(config(*BASE, *argv), world_size, STUDENT, teachers, heads)


def by_name(pair: Forecast) -> dict[str, PlannedPlace]:
    return {one.place.name: one for one in plan_places(pair)}


def in_bf16(planned: dict[str, PlannedPlace]) -> list[PlannedPlace]:
    return [one for name, one in planned.items() if "fp8" not in name]


def test_a_place_costs_what_its_flags_cost():
    planned = by_name(forecast(8, *PEERS, 2))
    assert [*planned] == [*PLACES, *(f"{name}, fp8" for name in PLACES), *STORED]
    for name, one in planned.items():
        argv = one.place.text(is_only=True).split()
        heads = (TEACHER,) if name == "stored hidden states" else ()
        direct = forecast(8, *argv, teachers=() if name in STORED else (TEACHER,), heads=heads)
        assert (one.step_ms, one.need_gib) == (direct.planned_step_ms(), fullest_rank(direct)[1])


def test_the_fastest_place_that_fits_is_chosen_and_the_simplest_of_equal_ones():
    """A pack of 8,192 tokens hides what peers exchange, but not copies from the host."""
    planned = by_name(forecast(8))
    for name, others in {
        "device": (),
        "2 peers": ("device",),
        "8 peers": ("device", "2 peers", "4 peers"),
    }.items():
        chosen = choose(in_bf16(planned), planned[name].need_gib)
        assert chosen is planned[name], name
        assert all(planned[other].need_gib > chosen.need_gib for other in others)
    assert choose(in_bf16(planned), planned["host"].need_gib).place.name == "host"
    assert planned["host"].step_ms > 1.1 * planned["8 peers"].step_ms


def test_a_place_wins_that_leaves_room_for_teachers_ahead():
    """On the device they would not fit, so that its step is longer than that of peers."""
    argv = ["--pipeline-model-parallel-size", 2, "--global-batch-size", 32]
    places = [(argv, "device"), ([*argv, *PEERS, 2], "2 peers")]
    (_, need), (_, less) = (fullest_rank(forecast(8, *given)) for given, _ in places)
    (_, behind) = fullest_rank(forecast(8, *argv, "--teacher-prefetch", 0))
    usable = (behind + need) / 2
    assert less < behind < usable < need
    known = ["--device-memory-gib", usable / 0.95]
    planned = by_name(forecast(8, *argv, *known))
    chosen = choose(in_bf16(planned), usable)
    assert chosen is planned["2 peers"] and chosen.step_ms < 0.99 * planned["device"].step_ms
    for given, name in places:
        direct = forecast(8, *given, *known)
        assert planned[name].step_ms == direct.planned_step_ms()
        assert direct.states_ahead == (0 if name == "device" else 4)


def test_the_place_of_a_run_has_the_step_time_of_its_plan():
    """With the update and the copies of its state. In a large plan no teacher is ahead, and it says so."""
    argv = ["--pipeline-model-parallel-size", 2, "--optimizer-residency", "host", "--global-batch-size"]
    pair = forecast(2, *argv, 32)
    whole_ms, (first, device, *_) = pair.planned_step_ms(), describe_places(pair, 140)
    assert f"from and to the host: {whole_ms:.4g} ms" in describe_forecast(pair)
    assert device.startswith(f"  device: {whole_ms:.4g} ms, ") and first.endswith("; all places:")
    (first, *_) = describe_places(forecast(2, *argv, 258), 140)
    assert first.endswith("; all places, without teachers ahead:")


def test_a_faster_place_wins_over_a_simpler_one():
    """Short packs do not hide what peers exchange: of those that fit, the fewest peers exchange least."""
    planned = by_name(forecast(8, "--seq-length", 256))
    assert planned["2 peers"].step_ms < 0.9 * planned["8 peers"].step_ms
    fast_last = [planned["8 peers"], planned["2 peers"]]
    assert choose(fast_last, planned["2 peers"].need_gib) is planned["2 peers"]


def test_a_stored_teacher_is_the_last_choice():
    """Its hidden states before its predictions, because the loss stays the same."""
    planned = by_name(forecast(8))
    (states, topk), host = (planned[name] for name in STORED), planned["host"]
    assert topk.need_gib < states.need_gib < host.need_gib
    assert topk.step_ms < states.step_ms < planned["device"].step_ms
    assert choose(in_bf16(planned), host.need_gib).place.name == "host"
    assert choose(in_bf16(planned), states.need_gib) is states
    assert choose(in_bf16(planned), topk.need_gib) is topk
    assert choose(in_bf16(planned), topk.need_gib - 0.1) is None


def test_a_plan_with_stored_hidden_states_counts_the_head_alone():
    """The rest is that of training without a teacher."""
    argv, plain = ("--teacher-hidden", "FOLDER"), forecast(8, "--kd-ratio", 0, teachers=())
    found, head_gib = forecast(8, *argv, teachers=(), heads=(TEACHER,)), 151936 * 4096 * 2 / 2**30
    (memory,), (without,) = found.memory.ranks, plain.memory.ranks
    assert memory.teacher_gib == pytest.approx(head_gib, rel=0.01) and without.teacher_gib == 0
    assert memory.activations_gib == without.activations_gib
    assert plain.planned_step_ms() < found.planned_step_ms() < 1.1 * plain.planned_step_ms()
    lines = describe_forecast(found).splitlines()
    (line,) = (one for one in lines if "hidden states are stored, 8,192 bytes a loss token" in one)
    assert line.startswith("teacher: ") and "head takes 1.16 GiB" in line and line.endswith(" a second")
    assert any(one.startswith("layers as CUDA graphs: student (") for one in lines)
    tensor = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    first, last = forecast(8, *argv, *tensor, teachers=(), heads=(TEACHER,)).memory.ranks
    assert first.teacher_gib == 0 and last.teacher_gib == pytest.approx(head_gib / 2, rel=0.01)


@pytest.mark.parametrize(
    ("world_size", "argv", "missing"),
    [
        (1, (), {"2 peers", "4 peers", "8 peers"}),
        (8, ("--kd-divergence", "reverse_kl"), {"stored top-k"}),
        (16, ("--tensor-model-parallel-size", 2), {"8 peers"}),
    ],
)
def test_places_that_are_not_possible_are_left_out(world_size, argv, missing):
    found = by_name(forecast(world_size, *argv))
    assert {*PLACES, *STORED} - {*found} == missing
    assert {name for name in PLACES if f"{name}, fp8" not in found} == missing - {*STORED}


def test_experts_over_processes_leave_fewer_peers():
    argv = ("--teacher-expert-model-parallel-size", 4, "--pipeline-model-parallel-size", 2)
    assert "4 peers" not in by_name(forecast(32, *argv, teachers=(MOE_TEACHER,)))
    assert "2 peers" in by_name(forecast(32, *argv, teachers=(MOE_TEACHER,)))


def test_fp8_is_the_fastest_and_the_choice_without_it_is_named():
    planned = by_name(forecast(8))
    device, fp8 = planned["device"], planned["device, fp8"]
    assert fp8.step_ms < 0.85 * device.step_ms and fp8.need_gib < device.need_gib - 6
    assert choose([*planned.values()], device.need_gib) is fp8
    first, *_ = describe_places(forecast(8), planned["host"].need_gib)
    assert (
        ": --teacher-precision fp8 --teacher-residency host; without FP8: --teacher-residency host;" in first
    )
    first, *_ = describe_places(
        forecast(8, *PEERS, 2, "--teacher-precision", "fp8"), planned["host, fp8"].need_gib
    )
    assert first.endswith("without FP8 nothing fits; all places:")


def test_the_forecast_says_which_peak_its_mfu_is_of():
    fp8 = describe_forecast(forecast(1, "--teacher-precision", "fp8"))
    assert "on H200 in bf16 and FP8, " in fp8 and " of the bf16 peak; at MFU 0.5" in fp8
    plain = describe_forecast(forecast(1))
    assert "on H200 in bf16, " in plain and "peak; at" not in plain


def test_teachers_that_cannot_be_in_fp8_are_planned_in_bf16():
    latent = replace(TEACHER.layers[0], mla=MLAShape(512, 128, 64, 128))
    latent = replace(TEACHER, layers=(latent,) * TEACHER.num_layers)
    assert not any("fp8" in name for name in by_name(forecast(8, teachers=(latent,))))
    blockwise = forecast(8, "--teacher-precision", "fp8", "--teacher-fp8-recipe", "blockwise")
    assert by_name(blockwise)["device"] == by_name(forecast(8))["device"]
    assert by_name(blockwise)["device, fp8"].step_ms > by_name(forecast(8))["device, fp8"].step_ms


def test_the_lines_name_the_choice():
    """Without a teacher there are none. Of several, all move, and no predictions can be stored."""
    pair = forecast(8)
    need = by_name(pair)["2 peers"].need_gib
    first, *lines = describe_places(pair, need)
    assert "; without FP8: --teacher-residency peers --teacher-peers 2; all places:" in first
    assert len(lines) == 14 and all(" teacher processes" in line for line in lines[-2:])
    assert lines[-4].endswith(", after an export of 7.63 GiB for a million loss tokens")
    assert [line.split(":")[0].strip() for line in lines if "does not fit" in line] == ["device"]
    settings = replace(config(*BASE), teachers=several({}, {}).teachers)
    two = forecast_of(settings, 8, STUDENT, (TEACHER, TEACHER))
    first, *lines = describe_places(two, by_name(two)["4 peers"].need_gib)
    assert "; without FP8: residency: peers, peers: 4 for every teacher;" in first and len(lines) == 11
    assert "precision: fp8, residency: " in first
    assert describe_places(forecast(8, teachers=()), 80) == []
