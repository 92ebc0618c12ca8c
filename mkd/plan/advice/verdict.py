"""The verdict of a plan: whether the run fits its GPUs and, if not, which settings to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from mkd.config.schema import Config
from mkd.config.student_base import with_student_base
from mkd.errors import MkdError
from mkd.human import milliseconds
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.advice.own_processes import describe_sides
from mkd.plan.advice.teacher_place import describe_places, separates_peers
from mkd.plan.checks.prefetch_limits import states_ahead
from mkd.plan.footprint.memory import RankMemory
from mkd.plan.forecast import Forecast
from mkd.plan.models.placement import Variant
from mkd.plan.models.planned_models import given_layouts
from mkd.plan.times.hardware import MACHINE, USABLE

SHOWN = 3  # number of remedies
USUAL_RANK = 16  # of adapters

QUICKLY_COMPARED = 4096
"""Most pipeline ranks x micro-batches, added up over plans, for which teachers ahead are planned: seconds."""


@dataclass(frozen=True)
class Change:
    """One thing that a user may change. Changes of the same kind exclude each other."""

    kind: str
    text: str  # what to write on the command line, or to leave out
    apply: Callable[[Config], Config]


@dataclass(frozen=True)
class Remedy:
    """Changes that make the run fit."""

    changes: tuple[Change, ...]
    forecast: Forecast  # with them
    need_gib: float
    is_planned: bool = True  # its time is that of a run, whose teachers may be ahead

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the changes."""
        return tuple(change.kind for change in self.changes)

    @cached_property
    def step_ms(self) -> float:
        """Predicted time of a step. If it is not planned, teachers are not ahead."""
        return self.forecast.planned_step_ms() if self.is_planned else self.forecast.step_ms()

    @cached_property
    def least_ms(self) -> float:
        """Time below which a planned `step_ms` cannot be."""
        return round(self.forecast.least_step_ms(), 3)

    def describe(self, more: str = "") -> str:
        """Return the flags, then `more`, then predicted time and memory."""
        flags = " ".join(change.text for change in self.changes)
        return f"{flags}{more}: {milliseconds(self.step_ms)}, {self.need_gib:.1f} GiB"


def describe(forecast: Forecast) -> str:
    """Describe the forecast, and with --device-memory-gib whether the run fits and what would help.

    It then also has a line for every place of the teachers' weights.
    """
    memory_gib = forecast.config.device_memory_gib
    usable_gib = None if memory_gib is None else USABLE * memory_gib
    described = [describe_forecast(forecast), *describe_sides(forecast, usable_gib)]
    if memory_gib is not None:
        described += [verdict(forecast, memory_gib), *describe_places(forecast, USABLE * memory_gib)]
    return "\n".join(described)


def verdict(forecast: Forecast, device_memory_gib: float) -> str:
    """Return whether the run fits, by how much and on which pipeline rank; if not, how to make it fit."""
    usable = USABLE * device_memory_gib
    rank, need = fullest_rank(forecast)
    left = (
        f"{usable:.1f} GiB that a GPU of {device_memory_gib:g} GiB has beside {100 * (1 - USABLE):.0f} % for "
        "fragmentation"
    )
    if need <= usable:
        return f"memory: fits; pipeline rank {rank} needs most, {need:.1f} of the {left}"
    missing = f"needs {need:.1f} GiB, {need - usable:.1f} more than the {left}"
    lines = [f"memory: does not fit; pipeline rank {rank} {missing}"]
    found = remedies(forecast, usable)
    if not found and not forecast.config.lora.is_on:
        found = remedies(forecast, usable, [ADAPTERS])
    if not found:
        changed = "no three changes of layout, batch, recomputation and residency make it fit"
        return "\n".join([*lines, f"{changed}: use more GPUs, or a shorter --seq-length"])
    now_ms = forecast.planned_step_ms() if found[0].is_planned else forecast.step_ms()
    lines.append(f"what fits, by predicted step time{left_out(found)} (as it is: {milliseconds(now_ms)}):")
    # without a given batch size it follows from the layout, which changes may alter
    follows = forecast.config.training.global_batch_size is None
    batch = f" --global-batch-size {forecast.batch.global_batch_size}" if follows else ""
    lines += [f"  {place}. {remedy.describe(batch)}" for place, remedy in enumerate(found[:SHOWN], 1)]
    return "\n".join(lines)


def fullest_rank(forecast: Forecast) -> tuple[int, float]:
    """Return (pipeline rank that needs most memory, GiB that it needs)."""
    ranks: Sequence[RankMemory] = forecast.memory.ranks
    rank = max(range(len(ranks)), key=lambda index: ranks[index].total_gib)
    return rank, ranks[rank].total_gib


def remedies(forecast: Forecast, usable_gib: float, further: Sequence[Change] = ()) -> list[Remedy]:
    """Return changes that make the run fit into `usable_gib`, by step time.

    Each also has the `further` changes. They are for a run that nothing else makes fit.
    Pairs of changes are tried if few single changes help, and three together if nothing else does. For each
    combination of kinds only the cheapest is kept. A set that contains a smaller remedy is left out, so every
    change in a remedy is necessary. Times are those of runs, unless their plans take long; beyond the first
    `SHOWN` the order is then that of `least_ms`.
    """
    training = replace(forecast.config.training, global_batch_size=forecast.batch.global_batch_size)
    config = replace(forecast.config, training=training)
    shapes = (forecast.student, *(teacher.shape for teacher in forecast.teachers))
    has_experts = [shape.moe is not None for shape in shapes]
    variants = [variant for kind in forecast.facts.kinds for variant in kind.variants]
    has_mixers = any(layer.mixer for layer in forecast.student.layers)
    known = list(
        changes(config, max(forecast.student_layout.layers), has_experts, variants, has_mixers=has_mixers)
    )
    found: list[Remedy] = []
    for size, wanted in ((0, 1), (1, SHOWN), (2, SHOWN), (3, 1)):
        if len(found) < wanted:
            smaller = [set(remedy.changes) for remedy in found]
            for chosen in combinations(known, size):
                is_new = len({change.kind for change in chosen}) == size and not any(
                    one <= {*further, *chosen} for one in smaller
                )
                remedy = _try(forecast, config, (*further, *chosen), usable_gib) if is_new else None
                found += [remedy] if remedy else []
    return _cheapest_planned(found) or _cheapest_of_kinds([replace(one, is_planned=False) for one in found])


def left_out(found: Sequence[Remedy]) -> str:
    """Return what the times of remedies leave out, as the end of a phrase."""
    return "" if all(one.is_planned for one in found) else " without teachers ahead"


def _try(forecast: Forecast, config: Config, chosen: tuple[Change, ...], usable_gib: float) -> Remedy | None:
    for change in chosen:
        config = change.apply(config)
    try:
        changed = forecast.with_config(config)
    except MkdError:
        return None
    if separates_peers(changed):
        return None
    _, need = fullest_rank(changed)
    return Remedy(chosen, changed, need) if need <= usable_gib else None


def _cheapest_planned(found: Sequence[Remedy]) -> list[Remedy] | None:
    """Return the cheapest of each combination of kinds by the time of a run; None if that takes long.

    Only those are planned that may be among the first `SHOWN`. The others follow by `least_ms`.
    """
    timed: list[Remedy] = []
    waiting = deque(sorted(found, key=lambda one: one.least_ms))
    searches: dict[Hashable, int] = {}  # of plans of teachers ahead: pipeline ranks x micro-batches
    while waiting:
        best = _cheapest_of_kinds(timed)
        if len(best) >= SHOWN and waiting[0].least_ms >= best[SHOWN - 1].step_ms:
            break
        one = waiting.popleft()
        if any(other.kinds == one.kinds and other.step_ms <= one.least_ms for other in best):
            continue
        search = one.forecast.prefetch_search
        if search is not None:
            searches[search] = len(search[0]) * search[1]
        if sum(searches.values()) > QUICKLY_COMPARED:
            return None
        if _can_be_planned(one):
            timed.append(one)
    best = _cheapest_of_kinds(timed)
    return _first_of_kinds([*best[:SHOWN], *sorted(best[SHOWN:] + [*waiting], key=lambda one: one.least_ms)])


def _can_be_planned(remedy: Remedy) -> bool:
    """Return False if no order of work gets through with its teachers ahead, which is not known to happen."""
    try:
        return remedy.step_ms >= 0
    except MkdError:
        return False


def _cheapest_of_kinds(found: Sequence[Remedy]) -> list[Remedy]:
    """Sort by step time in microseconds; equal ones keep their order."""
    return _first_of_kinds(sorted(found, key=lambda remedy: round(remedy.step_ms, 3)))


def _first_of_kinds(found: Sequence[Remedy]) -> list[Remedy]:
    best: dict[tuple[str, ...], Remedy] = {}
    for remedy in found:
        best.setdefault(remedy.kinds, remedy)
    return list(best.values())


def changes(
    config: Config,
    stage_layers: int,  # of the student's largest stage
    has_experts: Sequence[bool] = (False,),  # the student, and each teacher that runs
    variants: Sequence[Variant] = (),  # of teachers
    has_mixers: bool = False,  # the student
) -> Iterator[Change]:
    """Yield changes, the least intrusive first."""
    parallel, training = config.parallel, config.training
    if config.kd.kd_fp32_logits:
        yield _set("logits", "--no-kd-fp32-logits", "kd", kd_fp32_logits=False)
    if not parallel.use_distributed_optimizer:
        flag = "--use-distributed-optimizer"
        yield _set("optimizer", flag, "parallel", use_distributed_optimizer=True)
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield _set("sequence", "--sequence-parallel", "parallel", sequence_parallel=True)
    if not training.bf16:
        yield _set("precision", "--bf16", "training", bf16=True)
    if states_ahead(config):
        yield _set("teachers ahead", "--teacher-prefetch 0", "parallel", teacher_prefetch="0")
    size = training.micro_batch_size // 2
    while size:
        yield _set("batch", f"--micro-batch-size {size}", "training", micro_batch_size=size)
        size //= 2
    slots = config.rollout.rollout_slots // 2 if config.rollout.samples_here else 0
    while slots:
        yield _set("slots", f"--rollout-slots {slots}", "rollout", rollout_slots=slots)
        slots //= 2
    for factor in (2, 4, 8):
        yield from _more_expert_parallel(config, factor, has_experts)
    for module in ["moe"] * has_experts[0] + ["mixer"] * has_mixers:
        if training.recompute_granularity is None:
            text = f"--recompute-granularity selective --recompute-modules {module}"
            modules = dict(recompute_granularity="selective", recompute_modules=(module,))
            yield _set("recomputation", text, "training", **modules)
    if not (training.recompute_granularity == "full" and training.recompute_method == "uniform"):
        yield from _recomputations(stage_layers)
    yield from _residencies(config, variants)
    for factor in (2, 4, 8):
        yield from _larger_groups(config, factor)


def _with_adapters(config: Config) -> Config:
    return with_student_base(replace(config, lora=replace(config.lora, lora_rank=USUAL_RANK)))


ADAPTERS = Change("learned", f"--lora-rank {USUAL_RANK}", _with_adapters)
"""Adapters of usual rank learn, and nothing else: the trained model is another one."""


def _set(kind: str, text: str, section: str, **values: Any) -> Change:
    """Return the change that gives settings of a section of the configuration other values."""
    return Change(kind, text, lambda c: replace(c, **{section: replace(getattr(c, section), **values)}))


def _recomputations(stage_layers: int) -> Iterator[Change]:
    shares = sorted({-(-stage_layers * quarters // 4) for quarters in (1, 2, 3)})
    for method, layers in [*(("block", share) for share in shares), ("uniform", 1)]:
        settings = dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)
        text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        yield _set("recomputation", text, "training", **settings)


def _more_expert_parallel(config: Config, factor: int, has_experts: Sequence[bool]) -> Iterator[Change]:
    """Yield expert parallelism of the student, which its teachers follow, or of the teachers alone."""
    student, *teachers = has_experts
    size = factor * config.parallel.expert_model_parallel_size
    if student:
        text = f"--expert-model-parallel-size {size}"
        yield _set("experts", text, "parallel", expert_model_parallel_size=size)
    elif any(teachers):
        own = (one.expert_model_parallel_size or 1 for one in config.teachers)
        size = factor * max(own)
        only = len(config.teachers) == 1
        text = (
            f"--teacher-expert-model-parallel-size {size}" if only else f"expert_model_parallel_size: {size}"
        )
        text += "" if only else " for every teacher with experts"
        which = [index for index, teacher in enumerate(teachers) if teacher]
        yield Change("experts", text, lambda c: _with_teachers(c, which, expert_model_parallel_size=size))


def _residencies(config: Config, variants: Sequence[Variant]) -> Iterator[Change]:
    if config.training.optimizer_residency == "device":
        text = "--optimizer-residency host"
        yield _set("optimizer on host", text, "training", optimizer_residency="host")
    # Without those that change what a teacher predicts, and without other precisions.
    named = [one for one in variants if one.is_exact and "residency" in one.settings]
    running = [teacher for teacher in config.teachers if not teacher.stand_in]
    if named and any(map(named[0].is_of, running)):
        is_only = len(config.teachers) == 1
        yield from (Change("teacher", place.text(is_only), place.apply) for place in named[1:])


def _larger_groups(config: Config, factor: int) -> Iterator[Change]:
    parallel = config.parallel
    pipeline = factor * parallel.pipeline_model_parallel_size
    tensor = factor * parallel.tensor_model_parallel_size
    context = factor * parallel.context_parallel_size
    text = f"--pipeline-model-parallel-size {pipeline} --pipeline-layout auto"
    text += " without explicit layouts" if any(given_layouts(config)) else ""
    yield Change("pipeline", text, lambda c: _with_pipeline(c, pipeline))
    if tensor <= MACHINE:
        text = f"--tensor-model-parallel-size {tensor}"
        text += "" if parallel.sequence_parallel else " --sequence-parallel"
        yield _set("tensor", text, "parallel", tensor_model_parallel_size=tensor, sequence_parallel=True)
    text = f"--context-parallel-size {context}"
    yield _set("context", text, "parallel", context_parallel_size=context)


def _with_pipeline(config: Config, ranks: int) -> Config:
    """Return `config` with that many pipeline ranks, and automatic layouts of all models."""
    parallel = replace(config.parallel, pipeline_model_parallel_size=ranks, pipeline_layout="auto")
    student = replace(config.student, pipeline_layout=None)
    return replace(_with_teachers(config, pipeline_layout=None), parallel=parallel, student=student)


def _with_teachers(config: Config, which: Sequence[int] | None = None, **values: Any) -> Config:
    """Return `config` with other settings of these teachers (default: of all)."""
    teachers = (
        replace(one, **values) if which is None or index in which else one
        for index, one in enumerate(config.teachers)
    )
    return replace(config, teachers=tuple(teachers))
