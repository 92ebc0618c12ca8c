"""Check `--teacher-prefetch`: which runs have gaps for teacher forwards, and what `auto` chooses."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.plan.facts import RunFacts

FLAG, AUTO = "--teacher-prefetch", "auto"
DO_WITHOUT = f"remove {FLAG}"


def is_auto(config: Config) -> bool:
    """Return True if mkd chooses how far teachers are ahead."""
    return config.parallel.teacher_prefetch == AUTO


def states_ahead(config: Config) -> int:
    """Return the number of micro-batches that teacher forwards may be ahead of the loss.

    `auto` is twice the pipeline ranks, or 0 in a run that would refuse this number. It does not look at
    memory: `Forecast.states_ahead` does. Raises ValueError if the setting is neither `auto` nor a number.
    """
    if not is_auto(config):
        return int(config.parallel.teacher_prefetch)
    ahead = 2 * config.parallel.pipeline_model_parallel_size
    return 0 if any(obstacles(config)) else ahead


def check_prefetch(facts: RunFacts) -> Iterator[UsageError]:
    """Check the number, and that this run has gaps for teachers if it is not 0. `auto` fits every run."""
    config = facts.config
    try:
        ahead = states_ahead(config)
    except ValueError:
        ahead = -1
    if ahead < 0:
        why = "it is the number of micro-batches that teacher forwards may be ahead of the loss"
        what, do = f"{_given(config)} is no such number", "give 0 or more, or auto"
        yield UsageError(what, why, do, code="value-not-valid")
    elif ahead > 0 and config.needs_models:  # plain training reads no setting of teachers
        yield from obstacles(config)


def obstacles(config: Config) -> Iterator[UsageError]:
    """Yield everything that keeps teachers from running ahead; one reason, if no teacher is there."""
    parallel, given = config.parallel, _given(config)
    if not config.needs_models or all(one.stand_in for one in config.teachers):
        what = f"{given}, but no teacher runs"
        if any(one.is_apart for one in config.teachers):
            what = f"{given}, but no teacher shares the student's processes"
        why = (
            "a stored teacher needs no teacher forward, and one on processes of its own runs ahead by itself"
        )
        yield UsageError(what, why, DO_WITHOUT, code="teacher-prefetch-not-possible")
        return
    if parallel.pipeline_model_parallel_size == 1:
        what = f"{given}, but --pipeline-model-parallel-size is 1"
        why = "teacher forwards ahead fill the time that a pipeline waits, and there is none"
        yield UsageError(what, why, DO_WITHOUT, code="teacher-prefetch-not-possible")
    by_layers = parallel.num_layers_per_virtual_pipeline_stage
    by_stages = parallel.num_virtual_stages_per_pipeline_rank
    if by_layers is not None or (by_stages or 1) > 1:
        what = f"{given} with virtual pipeline stages"
        why = "teacher forwards ahead are planned for the gaps of the schedule without interleaving"
        do = f"{DO_WITHOUT}, or the virtual stages, which then gain little"
        yield UsageError(what, why, do, code="teacher-prefetch-not-possible")
    if config.rollout.is_on:
        what = f"rollouts cannot have teacher-prefetch {parallel.teacher_prefetch}"
        why = "the next completions, and the number of their micro-batches, depend on the update of this step"
        do = f"{DO_WITHOUT}, or train on stored text: --on-policy-fraction 0"
        yield UsageError(what, why, do, code="teacher-prefetch-not-possible")


def _given(config: Config) -> str:
    return f"{FLAG} {config.parallel.teacher_prefetch}"
