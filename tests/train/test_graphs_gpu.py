"""Check that a run with CUDA graphs is the run without, bit for bit where kernels are deterministic."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train.graphed_runs import RUNS, compared, make_files
from tests.train.graphed_steps import Forced, GraphRow, train

pytestmark = pytest.mark.gpu
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAP = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
BALANCE = ("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001")
ROUTED = dict(student="routed", teachers=("routed",), forced=Forced())
CUT = Forced(cuts_at_experts=True)
BLOCKWISE = ("--student-precision", "fp8")
FP8 = (*BLOCKWISE, "--student-fp8-recipe", "tensorwise")
MIXERS = ("--recompute-granularity", "selective", "--recompute-modules", "mixer")
DELTA = dict(student="delta", teachers=("delta",), forced=Forced())
TWO_TEACHERS = dict(teachers=("wider", "llama"))
DELTA_ROUTED = dict(student="delta routed", teachers=("delta routed",), tuned=True)
ROWS = (
    GraphRow("one GPU"),
    GraphRow("full recomputation", flags=FULL),
    GraphRow("selective recomputation", flags=("--recompute-granularity", "selective")),
    GraphRow("distributed optimizer, overlapped", flags=OVERLAP),
    GraphRow("windows, two rotary embeddings", student="gemma3", teachers=("gemma3",)),
    GraphRow("latent attention", student="latent", teachers=("latent",)),
    GraphRow("two teachers", **TWO_TEACHERS),
    GraphRow("FP8 teacher", flags=("--teacher-precision", "fp8")),
    GraphRow("FP8 student", flags=FP8),
    GraphRow("FP8 student, blockwise", flags=BLOCKWISE),
    GraphRow("FP8 student, full recomputation", flags=(*FP8, *FULL)),
    GraphRow("FP8 student, distributed, overlapped", flags=(*BLOCKWISE, *OVERLAP)),
    GraphRow("rounded student", flags=("--student-rounding", "nvfp4")),
    GraphRow("rounded student, distributed", flags=("--student-rounding", "int4", *DISTRIBUTED)),
    GraphRow("DP2 overlapped", 2, flags=OVERLAP),
    GraphRow("TP2 + SP", 2, tp=2),
    GraphRow("PP2", 2, pp=2),
    GraphRow("PP2 VPP2", 2, pp=2, vp=2),
    GraphRow("PP2, teachers ahead", 2, pp=2, flags=("--teacher-prefetch", "2")),
    GraphRow("PP2, two teachers ahead", 2, pp=2, flags=("--teacher-prefetch", "4"), **TWO_TEACHERS),
    GraphRow("CP2", 2, cp=2),
    GraphRow("FP8 student, DP2 overlapped", 2, flags=(*FP8, *OVERLAP)),
    GraphRow("FP8 student, TP2 + SP", 2, tp=2, flags=FP8),
    GraphRow("FP8 student, blockwise, TP2 + SP", 2, tp=2, flags=BLOCKWISE),
    GraphRow("FP8 student, PP2", 2, pp=2, flags=FP8),
    GraphRow("FP8 student, PP2 VPP2", 2, pp=2, vp=2, flags=BLOCKWISE),
    GraphRow("FP8 student, CP2", 2, cp=2, flags=FP8),
    GraphRow("PP2, full recomputation, overlapped", 2, pp=2, flags=(*FULL, *OVERLAP)),
    GraphRow("PP4, teachers ahead", 4, pp=4, flags=("--teacher-prefetch", "4")),
    GraphRow("TP2 + SP, PP2", 4, tp=2, pp=2),
    GraphRow("TP2 + SP, DP2 overlapped", 4, tp=2, flags=OVERLAP),
)
FORCED = (  # a run does not make these graphs by itself
    GraphRow("packs without graphs recomputed", forced=Forced(recomputes=True)),
    GraphRow("two layers a graph", flags=OVERLAP, forced=Forced(most_layers=2)),
    GraphRow("experts, teacher", teachers=("routed",), forced=Forced(student=False), graphed=("teacher",)),
    GraphRow("experts, student", student="routed", forced=Forced(teacher=False), graphed=("student",)),
    GraphRow("experts, both", flags=BALANCE, **ROUTED),
    GraphRow("experts, recomputed", flags=FULL + BALANCE, **ROUTED),
    GraphRow("experts, both, cut", flags=BALANCE, **ROUTED | dict(forced=CUT)),
    GraphRow("experts, overlapped, cut", flags=OVERLAP + BALANCE, **ROUTED | dict(forced=CUT)),
    GraphRow("shared experts", student="shared", teachers=("shared",), forced=Forced()),
    GraphRow("shared experts, cut", student="shared", teachers=("shared",), forced=CUT),
    GraphRow("gated delta nets", tuned=True, **DELTA),
    GraphRow("gated delta nets, recomputed", tuned=True, flags=MIXERS, **DELTA),
    GraphRow("gated delta nets in plain torch", **DELTA),
    GraphRow("Mamba-2, one block a layer", student="mamba", teachers=("mamba",), forced=Forced()),
    GraphRow("gated delta nets, PP2", 2, pp=2, tuned=True, **DELTA),
    GraphRow("gated delta nets, TP2 + SP", 2, tp=2, tuned=True, **DELTA),
    GraphRow("gated delta nets, PP2 VPP2", 2, pp=2, vp=2, tuned=True, **DELTA),
    GraphRow("gated delta nets, DP2 overlapped", 2, flags=OVERLAP, tuned=True, **DELTA),
    GraphRow("gated delta nets, CP2", 2, cp=2, tuned=True, **DELTA),
    GraphRow("delta nets beside experts", forced=Forced(), **DELTA_ROUTED),
    GraphRow("delta nets beside experts, cut", forced=CUT, **DELTA_ROUTED),
    GraphRow("delta nets beside experts, EP2", 2, ep=2, flags=OVERLAP, forced=Forced(), **DELTA_ROUTED),
    GraphRow("delta nets beside experts, PP2", 2, pp=2, forced=Forced(), **DELTA_ROUTED),
    GraphRow("delta nets beside experts, TP2 + SP", 2, tp=2, forced=Forced(), **DELTA_ROUTED),
    GraphRow("experts, EP2", 2, ep=2, flags=BALANCE, **ROUTED),
    GraphRow("experts, EP2 overlapped", 2, ep=2, flags=OVERLAP, **ROUTED),
    GraphRow("experts, PP2", 2, pp=2, flags=BALANCE, **ROUTED),
    GraphRow("experts, PP2, cut", 2, pp=2, flags=BALANCE, **ROUTED | dict(forced=CUT)),
    GraphRow("experts, TP2 + SP", 2, tp=2, flags=BALANCE, **ROUTED),
    GraphRow("experts, EP2 PP2, cut", 4, pp=2, ep=2, flags=BALANCE, **ROUTED | dict(forced=CUT)),
    GraphRow("experts, EP4 overlapped", 4, ep=4, flags=OVERLAP, **ROUTED),
    GraphRow("DP2 overlapped, two layers a graph", 2, flags=OVERLAP, forced=Forced(most_layers=2)),
)


def away(one: dict, other: dict) -> dict[str, float]:
    """Return the largest relative difference of each figure."""
    return {
        key: max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one[key], other[key], strict=True))
        for key in ("losses", "norms", "weights")
    }


@pytest.mark.parametrize("row", ROWS + FORCED, ids=lambda row: row.name)
def test_graphs_change_no_bit(row, gpu_ranks):
    skip_unless_gpus_take(row.ranks)
    eager = gpu_ranks.run(train, row.ranks, row, False)
    graphed = gpu_ranks.run(train, row.ranks, row, True)
    for without, with_graphs in zip(eager, graphed, strict=True):
        assert all(with_graphs["graphed"][name] for name in row.graphed), with_graphs["graphed"]
        assert away(without, with_graphs) == {"losses": 0.0, "norms": 0.0, "weights": 0.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", RUNS)
def test_graphs_change_no_bit_of_runs_that_make_their_rows(name, files, gpu_ranks):
    different, graphs, warnings = compared(gpu_ranks, files, name)
    assert (different, warnings) == ({}, "") and graphs > 1
