"""Check steps with CUDA graphs on a CPU, where work is carried out again in the place of a graph."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.train.graphed_steps import Forced, GraphRow, train
from tests.train.test_graphs_gpu import BALANCE, CUT, OVERLAP, ROUTED, away

ROWS = (
    GraphRow("experts, overlapped, cut", flags=OVERLAP + BALANCE, **ROUTED | dict(forced=CUT)),
    GraphRow("recomputed", forced=Forced(recomputes=True, most_layers=2)),
    GraphRow("EP2", 2, ep=2, flags=OVERLAP, **ROUTED),
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
