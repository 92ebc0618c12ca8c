"""Teachers on processes of their own: loss, gradients and states are those of teachers that have none."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import RankPool
from tests.train.invariance import (
    DISTRIBUTED,
    SINGLE,
    SP,
    Layout,
    errors_of,
    make_pair,
    require_equal,
    run_layout,
)
from tests.train.sides_run import own_layout, run_many_steps, run_sides, shared_states, whole_states


@pytest.fixture(scope="module")
def pool():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def single(pool, pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measures")
    (found,) = pool.run(run_layout, 1, SINGLE, *pair, folder / "single")
    return folder, found


CASES = {
    "TP1 from PP2": (Layout("s"), own_layout(2, pp=2), Layout("t", 2, pp=2)),
    "TP2 + SP from CP2": (Layout("s", 2, tp=2, flags=SP), own_layout(2, cp=2), Layout("t", 2, cp=2)),
}
SLOW = {
    "TP1 from TP2": (Layout("s"), own_layout(2, tp=2), Layout("t", 2, tp=2, flags=SP)),
    "TP2 from PP2": (Layout("s", 2, tp=2), own_layout(2, pp=2), Layout("t", 2, pp=2)),
    "TP2 + SP from PP2": (Layout("s", 2, tp=2, flags=SP), own_layout(2, pp=2), Layout("t", 2, pp=2)),
    "PP2 from TP2": (Layout("s", 2, pp=2), own_layout(2, tp=2), Layout("t", 2, tp=2, flags=SP)),
    "PP2 VPP2 from PP2": (Layout("s", 2, pp=2, vp=2), own_layout(2, pp=2), Layout("t", 2, pp=2)),
    "CP2 from TP2": (Layout("s", 2, cp=2), own_layout(2, tp=2), Layout("t", 2, tp=2, flags=SP)),
    "CP2 from CP2": (Layout("s", 2, cp=2), own_layout(2, cp=2), Layout("t", 2, cp=2)),
    "DP4 from DP2": (Layout("s", 4), own_layout(2), Layout("t", 2)),
    "DP2 from DP4": (Layout("s", 2, flags=DISTRIBUTED), own_layout(4), Layout("t", 4)),
    "TP2 PP2 DP2 + SP from TP2 CP2": (
        Layout("s", 8, tp=2, pp=2, flags=SP + DISTRIBUTED),
        own_layout(4, tp=2, cp=2),
        Layout("t", 4, tp=2, cp=2, flags=SP),
    ),
}


def check(pool, pair, single, folder, student: Layout, flags, teacher: Layout):
    """Compare a run on two sides with one process, and its states with those of a shared teacher."""
    measures, reference = single
    processes = int(flags[1])
    found = pool.run(run_sides, student.ranks + processes, student, pair, flags, folder, measures / "layout")
    students, teachers = found[: student.ranks], found[student.ranks :]
    require_equal(errors_of([one["measures"] for one in students], measures, reference))
    states = whole_states([one["states"] for one in students])
    of_shared = pool.run(shared_states, teacher.ranks, teacher, pair)
    expected = whole_states(of_shared)
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[ids], expected[ids]) for ids in states)
    assert all(one["forwards"] for one in teachers)
    return students, teachers


@pytest.mark.parametrize("case", CASES)
def test_layouts(pool, pair, single, tmp_path, case):
    check(pool, pair, single, tmp_path, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_more_layouts(pool, pair, single, tmp_path, case):
    check(pool, pair, single, tmp_path, *SLOW[case])


def several(folder, teacher, *more: str) -> tuple[str, str]:
    """Return the flag of a file with three teachers, of which the last two have these settings."""
    folder.mkdir(exist_ok=True)
    entries = [
        f"{{hf: {teacher}, name: {name}{extra}}}" for name, extra in zip("abc", ("", *more), strict=True)
    ]
    (folder / "run.yaml").write_text(f"teachers: [{', '.join(entries)}]\n")
    return "--config", str(folder / "run.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("combination", ["weighted_sum", "average"])
def test_two_teachers_with_processes_and_one_without(pool, pair, tmp_path, combination):
    weights = ", weight: 2, temperature: 1.5", ", weight: 0.5"
    if combination == "average":
        weights = ", weight: 2", ", weight: 0.5"
    how = ("--teacher-combination", combination)
    alone = Layout("one", flags=(*several(tmp_path / "one", pair[1], *weights), *how))
    (reference,) = pool.run(run_layout, 1, alone, *pair, tmp_path / "single")
    sides = f"{weights[0]}, processes: 2, pipeline_model_parallel_size: 2", f"{weights[1]}, processes: 1"
    flags = (*several(tmp_path / "sides", pair[1], *sides), *how)
    student = Layout("s", 2, pp=2)
    found = pool.run(run_sides, 5, student, pair, flags, tmp_path, tmp_path / "layout")
    require_equal(errors_of([one["measures"] for one in found[:2]], tmp_path, reference))
    assert all(one["forwards"] for one in found[2:])


@pytest.mark.slow
def test_hundreds_of_rows_are_never_too_far_ahead(pool, pair, tmp_path):
    """Nothing grows, whichever side is slower at the moment."""
    flags = own_layout(2, pp=2, more=("--teacher-ahead", "3"))
    (ahead, growth), *kept = pool.run(run_many_steps, 3, Layout("s"), pair, flags, tmp_path, 50)
    assert ahead <= 3 and all(one <= 3 for one, _ in kept)
    assert growth < 8
