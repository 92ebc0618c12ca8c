"""All checks of a configuration, in the order in which their problems are listed.

A check is a function that returns or yields its problems, and raises none. To add one, list it here with the
options that it calculates with. It is skipped if one of these is out of range, because `check_ranges` reports
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mkd.errors import MkdError
from mkd.plan.checks.expert_limits import check_expert_settings, check_experts
from mkd.plan.checks.locations import check_data, check_folders, check_log, check_places, check_tasks
from mkd.plan.checks.parallel import (
    check_auto_layout,
    check_batch,
    check_ffn,
    check_heads,
    check_layouts,
    check_parallel,
    check_sequences,
)
from mkd.plan.checks.prefetch_limits import check_prefetch
from mkd.plan.checks.ranges import BATCH, EXPERTS, PACKS, SHARDS, STAGES, check_ranges, options_out_of_range
from mkd.plan.checks.teachers import check_models, check_objective
from mkd.plan.checks.training import check_length, check_recomputation, check_schedule
from mkd.plan.checks.vision_limits import check_train_parts, check_vision
from mkd.plan.facts import RunFacts

Check = Callable[[RunFacts], Iterable[MkdError]]

CHECKS: Mapping[Check, Sequence[str]] = {
    # of the settings alone
    check_ranges: (),
    check_length: (),
    check_models: (),
    check_objective: (),
    check_prefetch: ("pipeline_model_parallel_size",),
    check_places: (),
    check_data: (),
    check_folders: (),
    check_tasks: (),
    check_schedule: (),
    check_recomputation: (),
    check_parallel: (),
    check_expert_settings: (),
    check_train_parts: (),
    check_log: (),
    check_sequences: (*PACKS, *SHARDS),
    # of the settings with the number of processes and the models of known shape
    check_batch: (*BATCH, *SHARDS, *STAGES),
    check_ffn: ("tensor_model_parallel_size",),
    check_heads: SHARDS,
    check_layouts: STAGES,
    check_experts: (*SHARDS, *STAGES, *EXPERTS),
    check_vision: STAGES,
}
"""Check -> options that it calculates with."""


def find_problems(facts: RunFacts) -> list[MkdError]:
    """Return every problem of a run. Unknown shapes (None) are not checked."""
    wrong = options_out_of_range(facts)
    problems: list[MkdError] = []
    for check, options in CHECKS.items():
        if wrong.isdisjoint(options):
            problems += check(facts)
    for kind in facts.kinds:
        if wrong.isdisjoint(kind.calculates_with):
            problems += kind.problems(facts)
    if not problems and facts.is_known:
        problems += check_auto_layout(facts)
    return problems
