"""The teachers that each micro-batch of a run needs: those of its tags, and of replicas in step with it."""

from __future__ import annotations

from collections.abc import Sequence

from mkd.config.tag_rules import TagRules
from mkd.data.tags import TeacherRoutes
from mkd.kinds.routed.tagged_records import in_step_of
from mkd.parallel.context import ParallelContext
from mkd.resolve.run_plan import Plan
from mkd.train.teachers.routed_terms import RunTags

ALONE = 1
"""Block of a teacher that does not run in the student's processes: each replica asks for states alone."""


def run_tags(plan: Plan, names: Sequence[str]) -> RunTags | None:
    """Return the tags of a run, whose packs have these `names`; None: all records have all teachers."""
    rules = TagRules.of(plan.config)
    return None if rules is None else RunTags(tuple(names), rules)


def teacher_routes(plan: Plan, names: Sequence[str], context: ParallelContext) -> TeacherRoutes | None:
    """Return which teachers a micro-batch needs, with these `names` of tags; None: all teachers."""
    rules = TagRules.of(plan.config)
    if rules is None:
        return None
    row, data, facts = context.sizes.row, context.dp_size, plan.facts
    here = dict(zip(facts.read_teachers, facts.planned_teachers, strict=True))
    blocks = {one.name: in_step_of(here[one.index]) if one.index in here else ALONE for one in plan.setups}
    replicas = {name: replicas_in_step(row, data, block, context.dp_rank) for name, block in blocks.items()}
    return TeacherRoutes.of(rules, names, replicas)


def replicas_in_step(row: int, replicas: int, block: int, replica: int) -> tuple[int, ...]:
    """Return the replicas that run a teacher together with `replica`, ascending.

    `row` neighbouring processes have a replica's micro-batch, `block` neighbouring processes exchange weights
    or tokens of the teacher. Both count from the first process of a pipeline stage.
    """
    found = {replica}
    while True:
        processes = {one * row + place for one in found for place in range(row)}
        blocks = {process // block for process in processes}
        more = {(one * block + place) // row for one in blocks for place in range(block)}
        more = {one for one in more if one < replicas}
        if more <= found:
            return tuple(sorted(found))
        found |= more
