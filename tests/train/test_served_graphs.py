"""Check the states of a teacher on a process of its own whose layers run as CUDA graphs, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import skip_unless_gpus_take
from tests.train.invariance import NUM_PACKS, Layout, make_pair
from tests.train.served_graphs import STEPS, run_sides
from tests.train.sides_run import own_layout

WIDE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_hidden_layers=4,
)


def require_equal_states(found: list[tuple], expected: list[tuple]) -> None:
    assert [ids for ids, *_ in found] == [ids for ids, *_ in expected] and len(found) == STEPS * NUM_PACKS
    for (ids, rows, state), (_, other_rows, other) in zip(found, expected, strict=True):
        assert torch.equal(rows, other_rows) and torch.equal(state, other), ids


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replayed_work_has_the_same_bits(ranks, tmp_path, stages):
    pair, found = make_pair(tmp_path, dict(num_hidden_layers=4)), {}
    for replays in (True, False):
        (folder := tmp_path / str(replays)).mkdir()
        given = Layout("s"), pair, own_layout(stages, pp=stages), folder, replays
        states, *graphed = ranks.run(run_sides, 1 + stages, *given)
        assert [bool(one) for one in graphed] == [replays] * stages
        found[replays] = states
    require_equal_states(found[True], found[False])


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("--teacher-precision", "fp8")], ids=["bf16", "fp8"])
def test_graphs_change_no_bit(gpu_ranks, tmp_path, more):
    """One GPU for the student, one for the teacher."""
    skip_unless_gpus_take(2)
    pair, found = make_pair(tmp_path, WIDE), {}
    for graphs in ("auto", "off"):
        (folder := tmp_path / graphs).mkdir()
        layout = Layout("s", flags=("--bf16", "--deterministic-mode", "--cuda-graphs", graphs))
        states, graphed = gpu_ranks.run(run_sides, 2, layout, pair, own_layout(1, more=more), folder)
        assert bool(graphed) == (graphs == "auto")
        found[graphs] = states
    require_equal_states(found["auto"], found["off"])
