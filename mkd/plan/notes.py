"""Notes below a plan: settings without effect that are no mistakes, and what makes a step slow."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.options import FIRST_TEACHER, settings
from mkd.config.schema import Config
from mkd.plan.checks.prefetch_limits import FLAG
from mkd.plan.forecast import Forecast
from mkd.plan.host_time import kernel_start_ms

SLOWER = 1.001
"""Step times of which the longer is at most so many times the shorter count as equal."""


def plan_notes(forecast: Forecast) -> Iterator[str]:
    """Yield the notes, a line each."""
    unread = list(_unread_teachers(forecast.config))
    if unread:
        yield f"note: kd-ratio is 0, so no teacher runs; without effect: {', '.join(unread)}"
    behind_ms, pipeline_ms = forecast.step().step_ms, forecast.pipeline_ms()
    if pipeline_ms > SLOWER * behind_ms:
        ahead = f"{FLAG} {forecast.states_ahead}"
        yield f"note: {ahead} is slower than 0 here: {pipeline_ms:.4g} ms, not {behind_ms:.4g} ms"
    layouts = forecast.student_layout, forecast.teacher_layouts
    fast_ms, slow_ms = kernel_start_ms(forecast.config, *layouts, forecast.batch.num_microbatches)
    if forecast.config.training.bf16 and slow_ms > pipeline_ms:
        fast_ms, slow_ms = fast_ms * forecast.updates, slow_ms * forecast.updates
        is_divided = forecast.config.parallel.tensor_model_parallel_size > 1
        less = "less tensor parallelism or more" if is_divided else "more"
        yield (
            f"note: the CPU may be the limit: to start the kernels of such a step takes {fast_ms:.4g} to "
            f"{slow_ms:.4g} ms, estimated from measured machines; {less} tokens in a micro-batch make it less"
        )


def _unread_teachers(config: Config) -> Iterator[str]:
    """Yield the settings of teachers if none runs: one configuration serves distillation and its baseline."""
    for option, value in settings(config) if not config.needs_models else ():
        is_of_teacher = option.path.startswith(FIRST_TEACHER[:-2])
        is_ahead = option.name == "teacher_prefetch" and value != "0"
        if (is_of_teacher or is_ahead) and value != option.default:
            yield option.place
