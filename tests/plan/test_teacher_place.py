"""Check the places of a teacher's weights against plans of the same flags, and which place is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.plan.forecast import Forecast
from mkd.plan.teacher_place import PlannedPlace, choose, describe_places, plan_places
from mkd.plan.verdict import fullest_rank
from tests.plan.shapes import MOE_TEACHER, STUDENT, TEACHER, config, several

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1)
PEERS = ("--teacher-residency", "peers", "--teacher-peers")


def forecast(world_size: int, *argv: str | int, teachers=(TEACHER,)) -> Forecast:
    return Forecast.from_config(config(*BASE, *argv), world_size, STUDENT, teachers)


def by_name(pair: Forecast) -> dict[str, PlannedPlace]:
    return {one.place.name: one for one in plan_places(pair)}


def test_a_place_costs_what_its_flags_cost():
    planned = by_name(forecast(8, *PEERS, 2))
    assert [*planned] == ["device", "2 peers", "4 peers", "8 peers", "host", "stored"]
    for name, one in planned.items():
        argv = one.place.text(is_only=True).split()
        direct = forecast(8, *argv, teachers=() if name == "stored" else (TEACHER,))
        assert (one.step_ms, one.need_gib) == (direct.step_ms(), fullest_rank(direct)[1])


def test_the_fastest_place_that_fits_is_chosen_and_the_simplest_of_equal_ones():
    """A pack of 8,192 tokens hides what peers exchange, but not copies from the host."""
    planned = by_name(forecast(8))
    for name, others in {
        "device": (),
        "2 peers": ("device",),
        "8 peers": ("device", "2 peers", "4 peers"),
    }.items():
        chosen = choose([*planned.values()], planned[name].need_gib)
        assert chosen is planned[name], name
        assert all(planned[other].need_gib > chosen.need_gib for other in others)
    assert choose([*planned.values()], planned["host"].need_gib).place.name == "host"
    assert planned["host"].step_ms > 1.1 * planned["8 peers"].step_ms


def test_a_faster_place_wins_over_a_simpler_one():
    """Short packs do not hide what peers exchange: of those that fit, the fewest peers exchange least."""
    planned = by_name(forecast(8, "--seq-length", 256))
    assert planned["2 peers"].step_ms < 0.9 * planned["8 peers"].step_ms
    fast_last = [planned["8 peers"], planned["2 peers"]]
    assert choose(fast_last, planned["2 peers"].need_gib) is planned["2 peers"]


def test_a_stored_teacher_is_the_last_choice():
    planned = by_name(forecast(8))
    stored, host = planned["stored"], planned["host"]
    assert stored.need_gib < host.need_gib and stored.step_ms < planned["device"].step_ms
    assert choose([*planned.values()], host.need_gib).place.name == "host"
    assert choose([*planned.values()], stored.need_gib) is stored
    assert choose([*planned.values()], stored.need_gib - 0.1) is None


@pytest.mark.parametrize(
    ("world_size", "argv", "missing"),
    [
        (1, (), {"2 peers", "4 peers", "8 peers"}),
        (8, ("--kd-divergence", "reverse_kl"), {"stored"}),
        (16, ("--tensor-model-parallel-size", 2), {"8 peers"}),
    ],
)
def test_places_that_are_not_possible_are_left_out(world_size, argv, missing):
    names = {"device", "2 peers", "4 peers", "8 peers", "host", "stored"}
    assert names - {*by_name(forecast(world_size, *argv))} == missing


def test_experts_over_processes_leave_fewer_peers():
    argv = ("--teacher-expert-model-parallel-size", 4, "--pipeline-model-parallel-size", 2)
    assert "4 peers" not in by_name(forecast(32, *argv, teachers=(MOE_TEACHER,)))
    assert "2 peers" in by_name(forecast(32, *argv, teachers=(MOE_TEACHER,)))


def test_the_lines_name_the_choice():
    """Without a teacher there are none. Of several, all move, and none can be stored."""
    pair = forecast(8)
    need = by_name(pair)["2 peers"].need_gib
    first, *lines = describe_places(pair, need)
    assert "--teacher-residency peers --teacher-peers 2;" in first and len(lines) == 6
    assert [line.split(":")[0].strip() for line in lines if "does not fit" in line] == ["device"]
    settings = replace(config(*BASE), teachers=several({}, {}).teachers)
    two = Forecast.from_config(settings, 8, STUDENT, (TEACHER, TEACHER))
    first, *lines = describe_places(two, by_name(two)["4 peers"].need_gib)
    assert "residency: peers, peers: 4 for every teacher;" in first and len(lines) == 5
    assert describe_places(forecast(8, teachers=()), 80) == []
