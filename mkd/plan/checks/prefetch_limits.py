"""Check `--teacher-prefetch`: which runs have gaps that teacher forwards can fill."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config
from mkd.errors import UsageError

FLAG = "--teacher-prefetch"
DO_WITHOUT = f"remove {FLAG}"


def check_prefetch(config: Config) -> Iterator[UsageError]:
    """Check the number, that there is a pipeline without interleaving, and that a teacher runs."""
    parallel, given = config.parallel, f"{FLAG} {config.parallel.teacher_prefetch}"
    try:
        ahead = parallel.states_ahead
    except ValueError:
        ahead = -1
    if ahead < 0:
        why = "it is the number of micro-batches that teacher forwards may be ahead of the loss"
        do = "give 0 or more, or auto"
        yield UsageError(f"{given} is no such number", why, do, code="teacher-prefetch-not-valid")
    if ahead <= 0:
        return
    if parallel.pipeline_model_parallel_size == 1:
        what = f"{given}, but --pipeline-model-parallel-size is 1"
        why = "teacher forwards ahead fill the time that a pipeline waits, and there is none"
        yield UsageError(what, why, DO_WITHOUT, code="teacher-prefetch-without-pipeline")
    by_layers = parallel.num_layers_per_virtual_pipeline_stage
    by_stages = parallel.num_virtual_stages_per_pipeline_rank
    if by_layers is not None or (by_stages or 1) > 1:
        what = f"{given} with virtual pipeline stages"
        why = "teacher forwards ahead are planned for the gaps of the schedule without interleaving"
        do = f"{DO_WITHOUT}, or the virtual stages, which then gain little"
        yield UsageError(what, why, do, code="teacher-prefetch-with-interleaving")
    if not config.needs_models or not config.teachers or any(teacher.topk for teacher in config.teachers):
        what = f"{given}, but no teacher runs"
        why = "a stored teacher, and a --kd-ratio of 0, need no teacher forward"
        yield UsageError(what, why, DO_WITHOUT, code="teacher-prefetch-without-teacher")
