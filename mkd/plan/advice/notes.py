"""Notes below a plan: settings that have no effect but are not mistakes, and what makes a step slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mkd.config.models import FROZEN
from mkd.config.options import FIRST_TEACHER, settings
from mkd.config.schema import Config
from mkd.human import milliseconds, number
from mkd.plan.advice.cuda_graphs import PlannedGraphs, planned_graphs
from mkd.plan.advice.own_processes import side_notes
from mkd.plan.checks.prefetch_limits import FLAG
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.models.parameters import model_parameters
from mkd.plan.models.stored_experts import stored_experts
from mkd.plan.times.layer_time import recomputed_share

SLOWER = 1.001
"""Step times of which the longer is at most so many times the shorter count as equal."""

SMALL_TEACHER = 0.7
"""A teacher with less than this share of the student's parameters may be given in the student's place."""

# Estimates from the fastest and the slowest machine with H100s or H200s that was measured, in bf16 with
# Transformer Engine (docs/performance.md). Dense layers alone count: experts, FP8, gathers of peers and
# vision towers take longer.
FORWARD_MS = {False: (1.4, 3.1), True: (1.8, 5.1)}
"""Is there tensor parallelism -> milliseconds of one layer on the (fastest, slowest) machine."""
TRAINING_MS = {False: (3.4, 7.2), True: (4.4, 11.7)}
"""The same for forward and backward."""

OF_DIVERGENCE = tuple(
    f"kd.{name}"
    for name in (
        *("kd_divergence", "kd_jsd_beta", "kd_mixed_kl_weight", "kd_skew_alpha", "kd_temperature"),
        *("kd_temperature_scaling", "teacher_weighting", "teacher_weighting_temperature", "kd_fp32_logits"),
    )
)
"""Settings that only a divergence from a teacher reads."""

STAYS = "with precision stored they stay as they are, which takes less memory and more time"


def plan_notes(forecast: Forecast) -> Iterator[str]:
    """Yield the notes, a line each."""
    unread = list(_unread_teachers(forecast.config))
    if unread:
        names = ", ".join(unread)
        why = forecast.config.why_no_models
        yield f"note: no teacher runs, because {why}. These settings have no effect: {names}"
    if forecast.config.optimizer.lr == 0:
        yield "note: --lr is 0, so that no weight changes"
    yield from _swapped_models(forecast)
    yield from _same_model(forecast.facts)
    yield from _unread_keys(forecast.facts)
    yield from _dequantised_experts(forecast.facts)
    yield from side_notes(forecast)
    behind_ms, pipeline_ms = forecast.step.step_ms, forecast.pipeline_ms()
    if pipeline_ms > SLOWER * behind_ms:
        ahead = f"{FLAG} {forecast.states_ahead}"
        times = f"a step takes {milliseconds(pipeline_ms)} instead of {milliseconds(behind_ms)}"
        yield f"note: {ahead} is slower than {FLAG} 0 here: {times}"
    fast_ms, slow_ms = kernel_start_ms(forecast.facts, planned_graphs(forecast))
    if forecast.config.training.bf16 and slow_ms > pipeline_ms:
        fast_ms, slow_ms = fast_ms * forecast.updates, slow_ms * forecast.updates
        is_divided = forecast.config.parallel.tensor_model_parallel_size > 1
        less = "less tensor parallelism or more" if is_divided else "more"
        yield (
            "note: the CPU may be the limit: to start the kernels of a step, it needs "
            f"{milliseconds(fast_ms)} to {milliseconds(slow_ms)}, estimated from measured machines. "
            f"This takes less time with {less} tokens in a micro-batch"
        )


def kernel_start_ms(facts: RunFacts, graphs: PlannedGraphs) -> tuple[float, float]:
    """Return how many ms the busiest rank's CPU starts an update's kernels, (fastest, slowest).

    Those of layers that run as CUDA graphs do not count. Predicted times of steps leave it out: it varies by
    the machine, and shows only where it is longer than the kernels run.
    """
    config, (student, teachers) = facts.config, facts.layouts
    is_divided = config.parallel.tensor_model_parallel_size > 1
    again = recomputed_share(config.training, sum(student.layers) / len(student.layers))

    def rank_ms(rank: int, speed: int) -> float:
        forward, training = FORWARD_MS[is_divided][speed], TRAINING_MS[is_divided][speed]
        eager = [one for one, graphed in zip(teachers, graphs.teachers, strict=True) if not graphed]
        of_teachers = sum(sum(one.layers[rank :: one.pipeline_parallel]) for one in eager)
        of_student = 0 if graphs.student else sum(student.layers[rank :: student.pipeline_parallel])
        return of_student * (training + again * forward) + of_teachers * forward

    ranks = range(student.pipeline_parallel)
    fastest, slowest = (max(rank_ms(rank, speed) for rank in ranks) for speed in (0, 1))
    return facts.batch.num_microbatches * fastest, facts.batch.num_microbatches * slowest


def _swapped_models(forecast: Forecast) -> Iterator[str]:
    """Yield a note if the only teacher is much smaller than the student."""
    student = model_parameters(forecast.student).total
    teachers = [model_parameters(teacher.shape).total for teacher in forecast.teachers]
    if len(teachers) == 1 and teachers[0] < SMALL_TEACHER * student:
        sizes = f"{number(teachers[0])} parameters, the student {number(student)}"
        yield f"note: the teacher has {sizes}: are --teacher-hf and --student-hf swapped?"


def _same_model(facts: RunFacts) -> Iterator[str]:
    """Yield a note for each teacher that the student starts from, in a plain distillation."""
    config = facts.config
    for index, teacher in facts.running.items() if config.starts_alike else ():
        is_other = teacher.load or teacher.weights != FROZEN or teacher.has_own_row
        if not is_other and teacher.hf == config.student.hf:
            yield (
                f"note: the {facts.roles[index]} is the model that the student starts from, {teacher.hf}: "
                "their divergence begins at 0, and only other terms of the loss move the student"
            )


def precision_note(forecast: Forecast) -> list[str]:
    """Return a note for a run in fp32 on GPUs, where the default of --bf16 surprises."""
    training = forecast.config.training
    if training.bf16:
        return []
    faster = forecast.with_config(replace(forecast.config, training=replace(training, bf16=True)))
    fast, slow = (milliseconds(one.planned_step_ms()) for one in (faster, forecast))
    usual = f"With --bf16, which is usual on GPUs, a step takes {fast} instead of {slow}"
    if fast == slow:  # both are below what the plan shows
        usual = "--bf16 is usual on GPUs"
    return [f"note: this run computes in fp32. {usual}"]


def _unread_keys(facts: RunFacts) -> Iterator[str]:
    """Yield a note for each model whose config.json has keys that change nothing."""
    student = () if facts.student is None else (("the student", facts.student),)
    teachers = zip(facts.roles, facts.teachers, strict=False)
    for role, shape in (*student, *teachers):
        if shape is not None and (keys := shape.unread_keys()):
            yield f"note: config.json of {role} has keys without effect on {shape.family}: {', '.join(keys)}"


def _dequantised_experts(facts: RunFacts) -> Iterator[str]:
    """Yield a note for each teacher whose experts its checkpoint stores as codes that are not kept."""
    for given, teacher in zip(facts.running.values(), facts.planned_teachers, strict=False):
        stored = None if given.load else stored_experts(teacher.shape)
        keeps = given.precision == "fp8" and given.fp8_recipe == "blockwise"
        if stored is None or given.precision == "stored" or (keeps and stored.keeps_blocks):
            continue
        again = ", and rounded again" if given.precision == "fp8" else ""
        text = (
            f"note: experts of the {teacher.role} are stored as {stored.name} and dequantised while they are "
        )
        kept = f"they cannot stay so, because {stored.why_not}" if stored.why_not else STAYS
        yield f"{text}read{again}; {kept}"


def _unread_teachers(config: Config) -> Iterator[str]:
    """Yield the settings of teachers if none runs: one configuration serves distillation and its baseline."""
    for option, value in settings(config) if not config.needs_models else ():
        is_of_teacher = option.path.startswith(FIRST_TEACHER[:-2])
        is_ahead = option.name == "teacher_prefetch" and value != "0"
        is_of_loss = option.path in OF_DIVERGENCE
        if (is_of_teacher or is_ahead or is_of_loss) and value != option.default:
            yield option.place
