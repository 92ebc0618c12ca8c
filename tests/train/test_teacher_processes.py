"""Teachers on processes of their own: loss, gradients and states are those of teachers that have none."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.train.apart_invariance import (
    EXPERT_ROWS,
    PLACES,
    ROWS,
    Row,
    compare,
    make_second,
    same_states,
    several,
)
from tests.train.invariance import SINGLE, Layout, make_pair, require_equal, run_layout
from tests.train.moe_invariance import make_moe_pair
from tests.train.sides_run import own_layout, run_many_steps

DEFAULT = ("TP1 <- PP2", "TP2 + SP <- CP2")


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


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in DEFAULT else pytest.mark.slow) for one in ROWS]
)
def test_layouts(pool, pair, single, tmp_path, name):
    """Compare a run on two sides with one process, and its states with those of a shared teacher."""
    measures, reference = single
    errors, found = compare(pool, pair, ROWS[name], tmp_path, measures, reference)
    require_equal(errors)
    assert same_states(pool, pair, ROWS[name], found)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_ROWS)
def test_experts(pool, tmp_path, name):
    pair = make_moe_pair(tmp_path)
    (reference,) = pool.run(run_layout, 1, SINGLE, *pair, tmp_path / "single")
    errors, found = compare(pool, pair, EXPERT_ROWS[name], tmp_path / "launch", tmp_path, reference)
    require_equal(errors)
    assert same_states(pool, pair, EXPERT_ROWS[name], found)


@pytest.mark.slow
@pytest.mark.parametrize("order", [one for one in PLACES if "1 process" in one])
@pytest.mark.parametrize("combination", ["weighted_sum", "average"])
def test_two_teachers_with_processes_and_one_without(pool, pair, tmp_path, combination, order):
    """Two of other sizes, and one beside the student, in front of them or between them."""
    models = pair[1], make_second(tmp_path), combination
    alone = Layout("one", flags=several(tmp_path / "one", *models))
    (reference,) = pool.run(run_layout, 1, alone, *pair, tmp_path / "single")
    one = Row(Layout("s", 2, pp=2), several(tmp_path / "sides", *models, *PLACES[order]), 3, None)
    errors, _ = compare(pool, pair, one, tmp_path / "launch", tmp_path, reference)
    require_equal(errors)


@pytest.mark.slow
def test_a_thousand_steps_grow_nothing(pool, tmp_path):
    """States are never too far ahead, whichever side is slower at the moment."""
    pair = make_pair(tmp_path, dict(num_hidden_layers=2))
    steps, flags = 1000, own_layout(2, pp=2, more=("--teacher-ahead", "3"))
    pool.timeout_s = 1800
    (ahead, growth), *kept = pool.run(run_many_steps, 3, Layout("s"), pair, flags, tmp_path, steps)
    assert ahead <= 3 and all(one <= 3 for one, _ in kept)
    assert growth < 8 and all(one < 8 for _, one in kept)
