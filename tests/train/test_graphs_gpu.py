"""Check that a run with CUDA graphs is the run without, bit for bit where kernels are deterministic."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train.graphed_steps import GraphRow, train

pytestmark = pytest.mark.gpu
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAP = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
ROWS = (
    GraphRow("one GPU"),
    GraphRow("full recomputation", flags=FULL),
    GraphRow("selective recomputation", flags=("--recompute-granularity", "selective")),
    GraphRow("distributed optimizer, overlapped", flags=OVERLAP),
    GraphRow("windows, two rotary embeddings", student="gemma3", teachers=("gemma3",)),
    GraphRow("latent attention", student="latent", teachers=("latent",)),
    GraphRow("two teachers", teachers=("wider", "llama")),
    GraphRow("FP8 teacher", flags=("--teacher-precision", "fp8")),
    GraphRow("DP2 overlapped", 2, flags=OVERLAP),
    GraphRow("TP2 + SP", 2, tp=2),
    GraphRow("PP2", 2, pp=2),
    GraphRow("PP2 VPP2", 2, pp=2, vp=2),
    GraphRow("PP2, teachers ahead", 2, pp=2, flags=("--teacher-prefetch", "2")),
    GraphRow("CP2", 2, cp=2),
    GraphRow("PP2, full recomputation, overlapped", 2, pp=2, flags=(*FULL, *OVERLAP)),
)


def away(one: dict, other: dict) -> dict[str, float]:
    """Return the largest relative difference of each figure."""
    return {
        key: max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one[key], other[key], strict=True))
        for key in ("losses", "norms", "weights")
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_graphs_change_no_bit(row, gpu_ranks):
    skip_unless_gpus_take(row.ranks)
    eager = gpu_ranks.run(train, row.ranks, row, False)
    graphed = gpu_ranks.run(train, row.ranks, row, True)
    for without, with_graphs in zip(eager, graphed, strict=True):
        assert all(with_graphs["graphed"][name] for name in row.graphed), with_graphs["graphed"]
        assert away(without, with_graphs) == {"losses": 0.0, "norms": 0.0, "weights": 0.0}
