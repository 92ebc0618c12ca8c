"""The life of a process of a teacher that has processes of its own: build, answer, end with the student."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from mkd.models.builder import common_padded_vocab_size
from mkd.operations.phases import FORWARD_BACKWARD, WAITING, Phases
from mkd.operations.watchdog import Watchdog
from mkd.parallel.context import ParallelContext
from mkd.parallel.side_groups import PATIENCE, Launch
from mkd.parallel.side_links import SideLinks, send_head
from mkd.parallel.state_links import StateLinks
from mkd.plan.advice.cuda_graphs import served_graphs
from mkd.plan.sides import Side
from mkd.platform import Platform
from mkd.resolve.run_plan import Plan
from mkd.run.one_model import ModelPlan
from mkd.run.student_side import launch_timeout
from mkd.train.layer_graphs import graph_teacher
from mkd.train.state_server import StateServer
from mkd.train.teacher_idle import BUSY_MS, ROWS


def serve_teacher(
    plan: Plan,  # of the student's side
    alone: ModelPlan,  # of this side
    side: Side,
    launch: Launch,
    platform: Platform,
    watchdog: Watchdog,
) -> int:
    """Run the teacher until the student's processes end. Return the exit code that they end with."""
    launch.join(side, platform, launch_timeout(plan.config))
    context = alone.join(platform)
    watchdog.meet_peers(launch)
    phases = Phases(watchdog)
    server = build_server(plan, alone, side, launch, context, phases)
    assert watchdog.heartbeat is not None, "a launch with several sides has one"
    figures = watchdog.heartbeat.figures
    figures |= {ROWS: 0, BUSY_MS: 0.0}
    server.forwards = partial(announced, phases, server, figures)
    exit_code = server.serve()
    watchdog.stop()
    server.links.close()
    context.leave()
    return exit_code


def build_server(
    plan: Plan,
    alone: ModelPlan,
    side: Side,
    launch: Launch,
    context: ParallelContext,
    phases: Phases | None = None,
) -> StateServer:
    """Build the teacher, meet the student, and send it the head. Collective on both sides."""
    (model,) = alone.build(context)
    model.eval().requires_grad_(False)
    can_capture = context.platform.is_cuda and context.platform.transformer_engine
    if can_capture and runs_as_graphs(plan, side, context):
        graph_teacher(model, context)
    if phases is not None:
        phases.enter(WAITING, 0)  # the student may have to read its data for long
    links = SideLinks.open(launch, side.name, context, plan.facts.sizes, is_teacher=True)
    if links.states:
        rows = student_rows(plan, side)
        send_head(links, context, model.head_weight(), model.shape.vocab_size, rows)
    return StateServer(model, links, context, replica_group(context), pipeline(plan, alone, context))


def runs_as_graphs(plan: Plan, side: Side, context: ParallelContext) -> bool:
    """Return True if the teacher's layers run as CUDA graphs.

    The choice looks at the memory of GPUs, which may differ: what one process lacks, all do without.
    Collective: all-reduce MIN over the side.
    """
    forecast = plan.forecast
    (own,) = (one for one in forecast.sides if one.number == side.teacher)
    planned = served_graphs(own, plan.facts.sizes.data, forecast.usable_gib())
    agreed = torch.tensor(int(planned.reason is None), device=context.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


def student_rows(plan: Plan, side: Side) -> int:
    """Return the rows of the teacher's head as the student's processes pad it."""
    assert side.teacher is not None, "it is a teacher's side"
    setup, tensor = plan.setups[side.teacher], plan.facts.sizes.tensor
    if setup.has_own_tokens and setup.head_shape is not None:
        return setup.head_shape.padded_vocab_size(tensor)
    return common_padded_vocab_size(plan.facts.pair.same_tokens, plan.facts.sizes.tensor)


def pipeline(plan: Plan, alone: ModelPlan, context: ParallelContext) -> StateLinks | None:
    """Return the links between the stages of the teacher; None if there is one. Collective."""
    if context.pp_size == 1:
        return None
    training, parallel = plan.config.training, alone.config.parallel
    tokens = plan.batch.micro_batch_size * training.seq_length
    shards = context.sequence_shards(parallel.sequence_parallel)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    return StateLinks.build(context, [(tokens // shards, 1, alone.source.shape.hidden_size)], dtype)


def replica_group(context: ParallelContext) -> dist.ProcessGroup:
    """Return the processes of this replica, for messages on the host. Collective on the side."""
    sizes = context.sizes
    members = [
        [rank for rank in range(context.world_size) if rank // sizes.row % sizes.data == replica]
        for replica in range(sizes.data)
    ]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=PATIENCE, backend="gloo")
    return group


@contextmanager
def announced(phases: Phases, server: StateServer, figures: dict[str, float], number: int) -> Iterator[None]:
    """Announce a forward, which has the time limit of a step. Waiting for the student has none.

    Add the forwards that have ended to `figures`.
    """
    with phases(FORWARD_BACKWARD, number):
        yield
    rows, busy_ms = server.busy.take_ended()
    figures[ROWS] += rows
    figures[BUSY_MS] += busy_ms
    phases.enter(WAITING, 0)  # `number` counts rows, not iterations
