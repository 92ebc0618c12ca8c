"""Run a student and a teacher on a process of its own, whose layers run as CUDA graphs or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from tests.train.invariance import Layout
from tests.train.sides_run import built_server, microbatches, start_side, step_states, student_engine

STEPS = 3  # the first packs of any bounds run without graphs


def run_sides(layout: Layout, pair: tuple[Path, Path], flags: Sequence[str], folder: Path, replays=None):
    """Return the states of all steps, or how many bounds the teacher's process has graphs of.

    On a CPU, work is carried out again in the place of a graph if `replays`. If it is False, it is not, in
    packs with the same filled borders. None: as the run decides.
    """
    from mkd.platform import make_deterministic

    make_deterministic()
    launch, plan, side = start_side([*layout.argv(*pair), *flags], folder)
    if side.teacher is not None:
        with ExitStack() as patches:
            for one in () if replays is None else replaced(replays):
                patches.enter_context(one)
            return served(launch, plan, side, replays is not None)
    engine, _, context = student_engine(launch, plan, side)
    batches = microbatches(layout, context, 1, (0,))
    states = [step_states(engine, batches) for _ in range(STEPS)]
    engine.schedule.remote[0].stop(0)
    return [(ids, rows.cpu(), state.cpu()) for step in states for ids, rows, state, *_ in step]


def replaced(replays: bool) -> list:
    """Return what lets a CPU take the way of a GPU with graphs, or the one without."""
    from mkd.models.graphs.graphed_decoder import GraphedDecoder
    from tests.models.graphs.replayed_graphs import replayed_graphs

    def takes(graphs, packed):  # padding joins the documents, as on a GPU
        packed.cu_seqlens_q = packed.cu_seqlens_kv = packed.cu_seqlens_q_padded
        return without(graphs, packed)

    without = GraphedDecoder._takes
    found = [replayed_graphs(), patch.object(GraphedDecoder, "_takes", takes)]
    return found if replays else [*found, patch.object(GraphedDecoder, "_made", lambda *given: None)]


def served(launch, plan, side, is_graphed: bool) -> int:
    """Serve until the student ends. Return how many bounds have graphs."""
    from mkd.train.layer_graphs import graph_teacher

    server = built_server(launch, plan, side)
    if is_graphed:
        graph_teacher(server.model, server.context)
    assert server.serve() == 0
    graphs = server.model.graphs
    found = 0 if graphs is None else len(graphs.bounds)
    server.links.close()
    server.context.close()
    return found
