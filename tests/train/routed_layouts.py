"""Run two teachers routed by the tags of packs in the real engine, at any layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.train.invariance import NUM_PACKS, Layout, fixed_packs

TAGS = ("code", "law", "math")
OF_PACKS = (2, 2, 0, 0, 2, 2, 0, 1)  # number of the tag of each pack
ONE_EACH = ({"tags": ["math"]}, {"tags": ["code", "law"]})


def write_config(folder: Path, *more: dict, **kd) -> Path:
    """Write a configuration with both teachers; `more` are settings of each."""
    names = ("teacher", "second")
    teachers = [{"hf": str(folder / name), **of} for name, of in zip(names, more or ONE_EACH, strict=True)]
    path = folder / f"routed-{abs(hash((json.dumps(more), json.dumps(kd))))}.yaml"
    kd = {"teacher_combination": "route", "tag_key": "domain", **kd}
    settings = {"student": {"hf": str(folder / "student")}, "teachers": teachers, "kd": kd}
    path.write_text(json.dumps(settings))
    return path


@dataclass(frozen=True)
class TaggedPacks:
    """The packs of the invariance table with tags, as a data set."""

    packs: list
    images = None
    teacher_images = (None, None)

    def __getitem__(self, index):
        return self.packs[index]

    def tags_of(self, packs):
        return np.array(OF_PACKS)[packs]

    @classmethod
    def of(cls, layout: Layout) -> TaggedPacks:
        from mkd.data.teacher_input import SharedTokens

        shared = (SharedTokens(),) * 2
        packs = enumerate(fixed_packs(layout.permuted, padding=layout.ranks))
        return cls([replace(pack, teacher_inputs=shared, tag=OF_PACKS[n]) for n, pack in packs])


def command(layout: Layout, config: Path) -> list[str]:
    """Return the command line of a run with the teachers of the file."""
    return layout.argv(config.parent / "student", config)[4:] + ["--config", str(config)]


def build(layout: Layout, config: Path):
    """Return (engine, training state, this rank's micro-batches)."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run

    plan = plan_run(load_config(command(layout, config)).config, layout.ranks)
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    engine, state = build_engine(plan, context, tags=TAGS)
    return engine, state, dealt_packs(layout, plan, context)


def dealt_packs(layout: Layout, plan, context) -> list:
    """Return this rank's micro-batches of the tagged packs."""
    from mkd.data.loader import BatchLayout, MicroBatches
    from mkd.kinds.routed.route_setup import teacher_routes
    from mkd.plan.sides import apart_teachers

    deal = BatchLayout(
        layout.micro,
        NUM_PACKS,
        context.dp_rank,
        context.dp_size,
        context.row_shard,
        routes=teacher_routes(plan, TAGS, context),
        host_rows=tuple(apart_teachers(plan.config)) if context.holds_last_stage else (),
    )
    dataset = TaggedPacks.of(layout)
    make = MicroBatches(dataset, deal)
    return [make(one) for one in deal.deal(np.arange(NUM_PACKS), dataset)]


class Forwards:
    """Counts the forwards of each teacher inside, and fills the state of one that does not run with NaN."""

    def __init__(self, engine):
        teachers = [teacher for stage in engine.stages for teacher in stage.module.teachers]
        self.number = {id(teacher): place % 2 for place, teacher in enumerate(teachers)}
        self.ran, self.skipped = [0, 0], [0, 0]

    def __enter__(self):
        import mkd.models.stage as stage
        from mkd.train.remote_states import RemoteStates

        self._module, self._before = stage, (stage._run, stage.unread_state)
        self._remote, self._take = RemoteStates, RemoteStates.take

        def run(model, row):
            if id(model) in self.number:
                self.ran[self.number[id(model)]] += 1
            return self._before[0](model, row)

        def unread(model, row):
            self.skipped[self.number[id(model)]] += 1
            return self._before[1](model, row).fill_(float("nan"))

        def take(states, batch):
            state = self._take(states, batch)
            return state if states._is_needed(batch) else state.fill_(float("nan"))

        stage._run, stage.unread_state = run, unread
        RemoteStates.take = take
        return self

    def __exit__(self, *_):
        self._module._run, self._module.unread_state = self._before
        self._remote.take = self._take


def run_layout(layout: Layout, config: Path, runs_all: bool, out: Path) -> dict:
    """Return sums and forwards of one step and an evaluation; export the gradients to `out`."""
    return measures(*build(layout, config), config, runs_all, out)


def run_sides(layout: Layout, config: Path, runs_all: bool, folder: Path, out: Path) -> dict:
    """Return `run_layout` of the student's processes, and the number of forwards of a teacher's."""
    from tests.train.sides_run import serve, start_side, student_engine

    launch, plan, side = start_side(command(layout, config), folder)
    if side.teacher is not None:
        return {"forwards": serve(launch, plan, side).num_forwards}
    engine, state, context = student_engine(launch, plan, side, TAGS)
    found = measures(engine, state, dealt_packs(layout, plan, context), config, runs_all, out)
    for one in engine.schedule.remote:
        one.stop(0)
    return found


def measures(engine, state, batches: list, config: Path, runs_all: bool, out: Path) -> dict:
    """Return what `run_layout` does, of an engine and its micro-batches."""
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step
    from tests.train.invariance import export_gradients

    if runs_all:
        batches = [replace(batch, needed_teachers=()) for batch in batches]
    with Forwards(engine) as forwards:
        sums = export_gradients(engine, state, batches, config.parent / "student", out)
        counts = [*forwards.ran], [*forwards.skipped]
        held_out = evaluate(engine, [batches])
        step = train_step(engine, batches, following=batches)
        step = train_step(engine, batches)
    return {
        "sums": sums,
        "held_out": held_out.token_sums() | held_out.per_tag(True) | held_out.per_teacher(),
        "step": step.sums.token_sums() | step.sums.per_tag(True),
        "counts": counts,
        "grad_norm": step.grad_norm,
    }


def record_routed(layout: Layout, config: Path):
    """Return `record` of the packs, with the tags of each micro-batch and the sums by tag and teacher."""
    from tests.train.dense_teachers import record

    engine, _, batches = build(layout, config)
    recorded, heads, head_gradient, sums, _ = record(engine, batches)
    found = sums.token_sums(), sums.per_tag(True), sums.per_teacher()
    return recorded, heads, head_gradient, found, [batch.tags for batch in batches]
