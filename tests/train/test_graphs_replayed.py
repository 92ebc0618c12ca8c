"""Check steps with CUDA graphs on a CPU, where work is carried out again in the place of a graph."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.train.graphed_steps import Forced, GraphRow, train
from tests.train.test_graphs_gpu import BALANCE, CUT, OVERLAP, ROUTED, away

NVFP4 = ("--student-rounding", "nvfp4")
ROWS = (
    GraphRow("experts, overlapped, cut", flags=OVERLAP + BALANCE, **ROUTED | dict(forced=CUT)),
    GraphRow("recomputed, rounded", flags=NVFP4, forced=Forced(recomputes=True, most_layers=2)),
    GraphRow("EP2", 2, ep=2, flags=OVERLAP, **ROUTED),
    GraphRow("Mamba-2", student="mamba", teachers=("delta",), forced=Forced()),
)


def graphed_and_not(row: GraphRow) -> tuple[dict, dict]:
    """Train a few short steps without and with graphs; both in packs with filled borders."""
    from mkd.models.graphs.graphed_decoder import GraphedDecoder
    from tests.models.graphs.replayed_graphs import replayed_graphs
    from tests.train import graphed_steps

    def takes(graphs, packed):  # the packs have no padding
        packed.cu_seqlens_q = packed.cu_seqlens_kv = packed.cu_seqlens_q_padded
        return without(graphs, packed)

    without, short = GraphedDecoder._takes, dict(STEPS=3, PACKS=3, SEQ_LENGTH=128)
    with (
        replayed_graphs(),
        patch.object(GraphedDecoder, "_takes", takes),
        patch.multiple(graphed_steps, **short),
    ):
        with patch.object(GraphedDecoder, "_made", lambda *given: None):
            plain = train(row, True)
        return plain, train(row, True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_graphs_change_no_bit(row, ranks):
    for plain, graphed in ranks.run(graphed_and_not, row.ranks, row):
        assert graphed["graphed"] == {"student": 1, "teacher": 1} and graphed["graph_bytes"] == 0
        assert away(plain, graphed) == {"losses": 0.0, "norms": 0.0, "weights": 0.0}


def with_and_without_graphs_on_one_rank() -> tuple[dict, dict]:
    """Train two processes whose gradients have several buckets; the second time rank 1 can make no graph."""
    from mkd.models.graphs.graphed_decoder import GraphedDecoder
    from mkd.train import optimizer
    from tests.models.graphs.replayed_graphs import replayed_graphs
    from tests.train import graphed_steps

    def takes(graphs, packed):
        packed.cu_seqlens_q = packed.cu_seqlens_kv = packed.cu_seqlens_q_padded
        return without(graphs, packed)

    def made(graphs, *given):
        return None if graphs.sync and dist.get_rank() == 1 else makes(graphs, *given)

    without, makes, row = (
        GraphedDecoder._takes,
        GraphedDecoder._made,
        GraphRow("", 2, flags=OVERLAP, forced=Forced()),
    )
    small = partial(optimizer.DistributedDataParallelConfig, bucket_size=200_000)
    short = dict(STEPS=4, PACKS=1, SEQ_LENGTH=128)
    with (
        replayed_graphs(),
        patch.object(GraphedDecoder, "_takes", takes),
        patch.object(optimizer, "DistributedDataParallelConfig", small),
        patch.multiple(graphed_steps, **short),
    ):
        with patch.object(GraphedDecoder, "_made", lambda *given: None):
            plain = train(row, True)
        with patch.object(GraphedDecoder, "_made", made):
            return plain, train(row, True)


def test_reductions_start_in_one_order_with_and_without_graphs(ranks):
    """Bounds depend on the documents of a process: a pack may be a graph on one and not on another."""
    (plain, first), (_, second) = ranks.run(with_and_without_graphs_on_one_rank, 2)
    assert first["graphed"]["student"] == 1 and second["graphed"]["student"] == 0
    assert away(plain, first) == {"losses": 0.0, "norms": 0.0, "weights": 0.0}
