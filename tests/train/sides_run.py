"""Runs of the student and of teachers on processes of their own, on the ranks of a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.invariance import NUM_PACKS, NUM_UPDATES, Layout, fixed_packs, measure

TIMEOUT = timedelta(seconds=120)


def own_layout(processes: int, *, tp: int = 1, pp: int = 1, cp: int = 1, more: Sequence[str] = ()) -> tuple:
    """Return the flags of a teacher on processes of its own."""
    return (
        *("--teacher-processes", str(processes), "--teacher-tensor-model-parallel-size", str(tp)),
        *("--teacher-pipeline-model-parallel-size", str(pp)),
        *("--teacher-context-parallel-size", str(cp), *more),
    )


def run_sides(
    layout: Layout,
    pair: tuple[Path, Path],
    flags: Sequence[str],
    folder: Path,
    out: Path,
    num_updates: int = NUM_UPDATES,
) -> dict:
    """Return the measures of a student's process, with the states it got, or the counts of a teacher's."""
    from mkd.plan.sides import apart_teachers

    launch, plan, side = start_side(layout.argv(*pair) + list(flags), folder)
    if side.teacher is not None:
        server = serve(launch, plan, side)
        return {"forwards": server.num_forwards, "kept": server.most_kept}
    engine, state, context = student_engine(launch, plan, side)
    batches = microbatches(layout, context, len(plan.setups), apart_teachers(plan.config))
    states = step_states(engine, batches)
    found = measure(engine, state, batches, pair[0], out, num_updates)
    lead = [one.most_ahead for one in engine.schedule.remote]
    for one in engine.schedule.remote:
        one.stop(0)
    prefetch = engine.schedule.prefetch
    ahead = 0 if prefetch is None else prefetch.num_ahead
    return {"measures": found, "states": states, "lead": lead, "ahead": ahead}


def start_side(argv: list[str], folder: Path):
    """Leave the pool's process group, and return (launch, plan of the student's side, own side)."""
    from mkd.config.load import load_config
    from mkd.parallel.side_groups import Launch
    from mkd.plan.sides import sides_of
    from mkd.run.plan_run import plan_run

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    launch = Launch(dist.FileStore(str(folder / "launch"), size), rank, size)
    config = load_config(argv).config
    sides = sides_of(config, size)
    side = next(one for one in reversed(sides) if one.first <= rank)
    return launch, plan_run(config, sides[0].size), side


def serve(launch, plan, side, forwards=nullcontext):
    """Run a teacher's process until the student ends; return its server. `forwards` is entered for each."""
    server = built_server(launch, plan, side)
    server.forwards = forwards
    assert server.serve() == 0
    return server


def built_server(launch, plan, side):
    """Return the server of a teacher's process, which has met the student."""
    from mkd.plan.sides import side_of_teacher
    from mkd.platform import detect
    from mkd.run.one_model import plan_model
    from mkd.run.serve_teacher import build_server

    alone = plan_model([], side_of_teacher(plan.config, side.teacher), side.size, side.teacher)
    launch.join(side, detect(), TIMEOUT)
    return build_server(plan, alone, side, launch, alone.join(detect()))


def student_engine(launch, plan, side, tags: Sequence[str] = ()):
    """Return (engine, training state, context) of a student's process. `tags` are those of the run."""
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.student_side import links_of_student

    launch.join(side, detect(), TIMEOUT)
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    links = links_of_student(plan.config, launch, context)
    engine, state = build_engine(plan, context, tags=tags, links=links)
    return engine, state, context


def microbatches(layout: Layout, context, num_teachers: int = 1, apart: Iterable[int] = ()) -> list:
    """Return this rank's share of the global batch, with rows of the teachers `apart` and equal padding."""
    from mkd.data.batch import collate
    from mkd.data.teacher_input import SharedTokens

    shared = (SharedTokens(),) * num_teachers
    packs = [replace(pack, teacher_inputs=shared) for pack in fixed_packs(layout.permuted)]
    groups = [packs[i : i + layout.micro] for i in range(0, NUM_PACKS, layout.micro)]
    wholes = [collate(group) for group in groups[context.dp_rank :: context.dp_size]]
    rows = [one.with_host_rows(list(apart)).shard(context.row_shard) for one in wholes]
    return [one.to(context.device) for one in rows]


def step_states(engine, batches: list) -> list[tuple]:
    """Return the `held_state` of each micro-batch of a step. Only the last stage has some."""
    from mkd.train.step import training_objective

    kept: list[tuple] = []
    engine.optimizer.zero_grad()
    objective = training_objective(
        engine, batches, lambda given: kept.append(held_state(engine.context, given))
    )
    engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    engine.optimizer.zero_grad()
    return kept


def held_state(context, given) -> tuple:
    """Return (samples, rows, final state of the first teacher, rows of all) of a micro-batch.

    The rows are those of the teacher's whole row that the process holds.
    """
    from mkd.parallel.side_rows import HeldRows

    state, batch, sizes = given.output.teacher_hiddens[0][:, 0], given.batch, context.sizes
    (row,) = batch.teacher_inputs[0].token_rows(batch)
    if state.shape[0] == row.tokens.shape[1]:  # without sequence parallelism every rank has all of them
        sizes = replace(sizes, tensor=1)
    rows = HeldRows(sizes, context.row_rank if sizes.tensor > 1 else context.cp_rank)
    padded = row.cu_seqlens_padded
    return batch.sample_ids, rows.of(padded), state.cpu().clone(), int(padded[-1])


def shared_states(layout: Layout, pair: tuple[Path, Path]) -> list[tuple]:
    """Return `step_states` of a run whose teacher shares the student's processes and layout."""
    engine, _, batches = shared_engine(layout, pair)
    return step_states(engine, batches)


def run_shared(layout: Layout, pair: tuple[Path, Path], out: Path, num_updates: int = NUM_UPDATES) -> dict:
    """Return the measures of `run_sides` of such a run, with the same padding."""
    engine, state, batches = shared_engine(layout, pair)
    return measure(engine, state, batches, pair[0], out, num_updates)


def shared_engine(layout: Layout, pair: tuple[Path, Path]):
    """Return (engine, training state, micro-batches) of a run whose teacher shares the student's layout."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run

    argv = [*layout.argv(*pair), "--teacher-prefetch", "0"]
    plan = plan_run(load_config(argv).config, layout.ranks)
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    engine, state = build_engine(plan, context)
    return engine, state, microbatches(layout, context)


def whole_states(parts: Sequence[list[tuple]]) -> dict[tuple, torch.Tensor]:
    """Return samples -> whole state, from the parts of all processes, which must agree bitwise."""
    whole: dict[tuple, torch.Tensor] = {}
    for ids, rows, state, tokens in (one for part in parts for one in part):
        target = whole.setdefault(ids, torch.full((tokens, state.shape[-1]), float("nan")))
        known = target[rows]
        assert torch.equal(torch.where(known.isnan(), state, known), state), "processes have other states"
        target[rows] = state
    return whole


def run_many_steps(layout: Layout, pair: tuple[Path, Path], flags: Sequence[str], folder: Path, steps: int):
    """Run steps of uneven speed. Return (most that was ahead or kept, MiB that later steps added).

    A teacher's process compares its memory after a quarter of the rows with that after all of them.
    """
    import random

    from mkd.plan.sides import apart_teachers
    from mkd.train.step import train_step

    launch, plan, side = start_side(layout.argv(*pair) + list(flags), folder)
    if side.teacher is not None:
        rows = steps * len(fixed_packs(layout.permuted)) // layout.micro
        resident: dict[int, float] = {}

        @contextmanager
        def measured(number: int):
            yield
            if number in (rows // 4, rows):
                resident[number] = resident_mib()

        server = serve(launch, plan, side, measured)
        return server.most_kept, resident[rows] - resident[rows // 4]
    engine, _, context = student_engine(launch, plan, side)
    batches = microbatches(layout, context, len(plan.setups), apart_teachers(plan.config))
    uneven, resident = random.Random(0), []
    for step in range(steps):
        time.sleep(uneven.choice((0.0, 0.0, 0.1)))
        train_step(engine, batches, following=batches if step + 1 < steps else ())
        resident.append(resident_mib())
    (states,) = engine.schedule.remote
    states.stop(0)
    return states.most_ahead, resident[-1] - resident[steps // 4]


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
