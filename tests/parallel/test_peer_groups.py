"""Check that peers hold the same weights, by the ranks that Megatron gives processes on every axis."""

from __future__ import annotations

from itertools import product

import pytest

from mkd.parallel.axes import peer_ranks
from mkd.plan.parallel_sizes import Sizes


@pytest.mark.parametrize(
    ("tensor", "experts", "stages", "copies"), product((1, 2), (1, 2, 4, 3), (1, 2), (2, 4))
)
def test_peers_hold_the_same_weights(tensor, experts, stages, copies):
    """Every process has peers, and as many of them as fit into its pipeline stage."""
    of_stage = Sizes(tensor=tensor, expert=experts).weight_shards * copies
    groups = peer_ranks(of_stage * stages, Sizes(tensor=tensor, expert=experts).weight_shards, copies)
    assert sorted(rank for group in groups for rank in group) == [*range(of_stage * stages)]
    for group in groups:
        places = {(rank // of_stage, rank % tensor, rank % of_stage % experts) for rank in group}
        assert len(places) == 1 and len(group) == copies


def test_peers_are_the_nearest_processes():
    assert peer_ranks(8, 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert peer_ranks(8, Sizes(tensor=2, expert=4).weight_shards, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
