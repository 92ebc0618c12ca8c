"""Check which processes may split a teacher's layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.config.load import load_config
from tests.plan.shapes import MOE_TEACHER, TEACHER
from tests.reported import reports
from tests.run_facts import facts_of, problems_of, problems_of_one

BASE = "--student-hf s --teacher-hf t --data-path d --train-iters 10 --seq-length 64"
PEERS = "--teacher-residency peers"


def config(*argv: str):
    return load_config(" ".join([BASE, *argv]).split()).config


@pytest.mark.parametrize(
    ("argv", "world_size", "codes"),
    [
        (f"{PEERS} --teacher-peers 2", 2, []),
        (f"{PEERS} --teacher-peers 2", 4, []),
        (f"{PEERS} --teacher-peers 4 --context-parallel-size 2", 4, []),
        (f"{PEERS} --teacher-peers 2 --pipeline-model-parallel-size 2", 4, []),
        (f"{PEERS} --teacher-peers 3", 4, ["world-not-divisible: does not divide"]),
        (
            f"{PEERS} --teacher-peers 4 --tensor-model-parallel-size 2",
            4,
            ["world-not-divisible: does not divide"],
        ),
        (f"{PEERS} --teacher-peers 2", 1, ["world-not-divisible: residency peers, but no two"]),
        (
            f"{PEERS} --teacher-peers 2 --tensor-model-parallel-size 2",
            2,
            ["world-not-divisible: residency peers, but no two"],
        ),
        (f"{PEERS} --teacher-peers 1", 2, ["out-of-range: must be"]),
        (PEERS, 2, ["add-flag: residency peers, but no"]),
        ("--teacher-peers 2", 2, ["remove-flag: no effect"]),
        (f"{PEERS} --teacher-peers 2 --teacher-topk k", 2, ["remove-flag: no effect"] * 2),
        ("--teacher-peers 2 --teacher-topk k", 2, ["remove-flag: teacher-peers 2 would have no effect"]),
        ("--teacher-residency host --teacher-topk k", 1, ["remove-flag: no effect"]),
        (f"{PEERS} --teacher-peers 3 --kd-ratio 0", 2, []),
    ],
)
def test_codes_of_a_run(argv, world_size, codes):
    assert reports(problems_of(config(argv), world_size)) == codes


def test_a_teacher_that_runs_alone():
    """Without distillation too, an exported teacher is checked; an evaluated student has none."""
    split = config(PEERS, "--teacher-peers 3 --kd-ratio 0")
    assert reports(problems_of_one(split, 2, None, 0)) == ["world-not-divisible: does not divide"]
    assert problems_of_one(split, 3, None, 0) == problems_of_one(split, 2, None) == []
    exported = config(PEERS, "--teacher-peers 3 --teacher-topk k")  # the teacher runs to make k
    assert reports(problems_of_one(exported, 2, None, 0)) == ["world-not-divisible: does not divide"]


@pytest.mark.parametrize(
    ("tensor", "experts", "peers", "world_size", "codes"),
    [
        (1, 1, 4, 4, []),
        (1, 4, 2, 8, []),
        (2, 4, 2, 8, []),  # tensor-parallel processes share experts, too
        (1, 4, 2, 4, ["world-not-divisible: residency peers, but no two"]),
        (1, 4, 4, 8, ["world-not-divisible: does not divide"]),
        (2, 4, 4, 8, ["world-not-divisible: does not divide"]),
    ],
)
def test_processes_with_other_experts_are_no_peers(tensor, experts, peers, world_size, codes):
    sizes = f"--tensor-model-parallel-size {tensor} --teacher-expert-model-parallel-size {experts}"
    split = config(PEERS, f"--teacher-peers {peers} --sequence-parallel", sizes)
    assert reports(problems_of(split, world_size, None, [MOE_TEACHER])) == codes
    assert reports(problems_of_one(split, world_size, MOE_TEACHER, 0)) == codes


@pytest.mark.parametrize(
    ("tensor", "experts", "peers", "is_fine"),
    [(1, 1, 8, True), (2, 1, 4, True), (2, 1, 8, False), (3, 1, 2, False), (1, 4, 2, True), (1, 4, 4, False)],
)
def test_peers_are_on_one_machine(tensor, experts, peers, is_fine):
    """Machines have 8 processes each."""
    sizes = f"--tensor-model-parallel-size {tensor} --teacher-expert-model-parallel-size {experts}"
    split = config(PEERS, f"--teacher-peers {peers}", sizes)
    facts = facts_of(split, 48, None, [MOE_TEACHER])
    codes = reports(facts.machine_problems(8))
    assert codes == ([] if is_fine else ["world-not-divisible: networks are too slow"])
    assert facts.machine_problems(48) == []


@pytest.mark.parametrize(
    ("first", "machine", "is_fine"),
    [(8, 8, True), (4, 8, True), (6, 8, False), (6, 22, True), (10, 8, False)],
)
def test_peers_of_processes_of_their_own_are_on_one_machine(first, machine, is_fine):
    """16 processes from `first` on, of which 4 neighbours are peers."""
    facts = replace(facts_of(config(PEERS, "--teacher-peers 4"), 16, None, [TEACHER]), first=first)
    codes = reports(facts.machine_problems(machine))
    assert codes == ([] if is_fine else ["world-not-divisible: networks are too slow"])
