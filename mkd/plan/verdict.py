"""Whether a planned run fits its GPUs, and which settings to change if it does not, each tried through the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from mkd.errors import MkdError
from mkd.plan.forecast import Forecast
from mkd.plan.memory import RankMemory

USABLE = 0.95  # of a GPU's memory; torch's allocator loses a few percent to fragmentation
SHOWN = 3
MAX_TENSOR_PARALLEL = 8  # processes of one machine


@dataclass(frozen=True)
class Change:
    """One thing that a user may change. Of one kind, only one change makes sense at a time."""

    kind: str
    text: str  # what to write on the command line, or to leave out
    apply: Callable[[Any], Any]  # on an mkd.config.schema.Config


@dataclass(frozen=True)
class Remedy:
    """Changes with which the run fits."""

    changes: tuple[Change, ...]
    step_ms: float
    need_gib: float

    def describe(self, more: str = "") -> str:
        """`more` stands behind the flags."""
        return f"{' '.join(change.text for change in self.changes)}{more}: {self.step_ms:.4g} ms, {self.need_gib:.1f} GiB"


def verdict(forecast: Forecast, device_memory_gib: float, forecast_of: Callable[[Any], Forecast]) -> str:
    """Fits or not, by how much, on which pipeline rank; if not, the cheapest changes that make it fit.

    `forecast_of` plans another `Config` on the same processes, and raises MkdError where that cannot run.
    """
    usable = USABLE * device_memory_gib
    rank, need = fullest_rank(forecast)
    left = f"{usable:.1f} GiB that a GPU of {device_memory_gib:g} GiB has beside {100 * (1 - USABLE):.0f} % for fragmentation"
    if need <= usable:
        return f"memory: fits; pipeline rank {rank} needs most, {need:.1f} of the {left}"
    lines = [
        f"memory: does not fit; pipeline rank {rank} needs {need:.1f} GiB, {need - usable:.1f} more than the {left}"
    ]
    found = remedies(forecast, usable, forecast_of)
    if found:
        lines.append(
            f"what fits, by predicted step time without communication (as it is: {forecast.step_ms():.4g} ms):"
        )
        follows = (
            forecast.config.training.global_batch_size is None
        )  # from the layout, which the changes may change
        batch = f" --global-batch-size {forecast.batch.global_batch_size}" if follows else ""
        lines += [f"  {place}. {remedy.describe(batch)}" for place, remedy in enumerate(found[:SHOWN], 1)]
    else:
        lines.append(
            "no three changes of layout, batch, recomputation and residency make it fit: use more GPUs, or a shorter "
            "--seq-length"
        )
    return "\n".join(lines)


def fullest_rank(forecast: Forecast) -> tuple[int, float]:
    """(pipeline rank that needs most memory, GiB of it)."""
    ranks: Sequence[RankMemory] = forecast.memory().ranks
    rank = max(range(len(ranks)), key=lambda index: ranks[index].total_gib)
    return rank, ranks[rank].total_gib


def remedies(forecast: Forecast, usable_gib: float, forecast_of: Callable[[Any], Forecast]) -> list[Remedy]:
    """Changes that are enough, by step time: single ones, pairs where those are few, three together where nothing else is.

    Of each choice of kinds the cheapest. A set holds no smaller one that is enough, so that nothing in it is idle.
    """
    config = _training(forecast.config, global_batch_size=forecast.batch.global_batch_size)
    known = list(changes(config, max(forecast.student_layout.layers)))
    found: list[Remedy] = []
    for size, wanted in ((1, SHOWN), (2, SHOWN), (3, 1)):
        if len(found) < wanted:
            smaller = [set(remedy.changes) for remedy in found]
            for chosen in combinations(known, size):
                is_new = len({change.kind for change in chosen}) == size and not any(
                    one <= set(chosen) for one in smaller
                )
                remedy = _try(config, chosen, usable_gib, forecast_of) if is_new else None
                found += [remedy] if remedy else []
    return _cheapest_of_kinds(found)


def _try(
    config: Any, chosen: tuple[Change, ...], usable_gib: float, forecast_of: Callable[[Any], Forecast]
) -> Remedy | None:
    for change in chosen:
        config = change.apply(config)
    try:
        forecast = forecast_of(config)
    except MkdError:
        return None
    _, need = fullest_rank(forecast)
    return Remedy(chosen, forecast.step_ms(), need) if need <= usable_gib else None


def _cheapest_of_kinds(found: Sequence[Remedy]) -> list[Remedy]:
    """By step time to the microsecond; of equal ones in the order of `changes`."""
    best: dict[tuple[str, ...], Remedy] = {}
    for remedy in sorted(found, key=lambda remedy: round(remedy.step_ms, 3)):
        best.setdefault(tuple(change.kind for change in remedy.changes), remedy)
    return list(best.values())


def changes(config: Any, stage_layers: int) -> Iterator[Change]:
    """What may be changed, the least trouble first. `stage_layers`: of the student, on its largest stage."""
    kd, parallel = config.kd, config.parallel
    if kd.kd_fp32_logits:
        yield Change(
            "logits", "--no-kd-fp32-logits", lambda c: replace(c, kd=replace(c.kd, kd_fp32_logits=False))
        )
    if not parallel.use_distributed_optimizer:
        yield Change(
            "optimizer", "--use-distributed-optimizer", lambda c: _parallel(c, use_distributed_optimizer=True)
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Change("sequence", "--sequence-parallel", lambda c: _parallel(c, sequence_parallel=True))
    if not config.training.bf16:
        yield Change("precision", "--bf16", lambda c: _training(c, bf16=True))
    yield from _smaller_batches(config)
    yield from _recomputations(config, stage_layers)
    yield from _on_the_host(config)
    yield from _larger_groups(config)


def _smaller_batches(config: Any) -> Iterator[Change]:
    size = config.training.micro_batch_size // 2
    while size:
        yield Change(
            "batch", f"--micro-batch-size {size}", lambda c, size=size: _training(c, micro_batch_size=size)
        )
        size //= 2


def _recomputations(config: Any, stage_layers: int) -> Iterator[Change]:
    if config.training.recompute_granularity == "full" and config.training.recompute_method == "uniform":
        return
    shares = sorted({-(-stage_layers * quarters // 4) for quarters in (1, 2, 3)})
    for method, layers in [*(("block", share) for share in shares), ("uniform", 1)]:
        text = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"
        given = dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)
        yield Change("recomputation", text, lambda c, given=given: _training(c, **given))


def _on_the_host(config: Any) -> Iterator[Change]:
    if config.training.optimizer_residency == "device":
        text = "--optimizer-residency host"
        yield Change("optimizer on host", text, lambda c: _training(c, optimizer_residency="host"))
    waiting = [teacher for teacher in config.teachers if not teacher.topk and teacher.residency == "device"]
    if waiting:
        text = (
            "--teacher-residency host" if len(config.teachers) == 1 else "residency: host for every teacher"
        )
        yield Change(
            "teacher on host",
            text,
            lambda c: replace(
                c, teachers=tuple(replace(teacher, residency="host") for teacher in c.teachers)
            ),
        )


def _larger_groups(config: Any) -> Iterator[Change]:
    for factor in (2, 4, 8):
        yield from _factor_larger(config, factor)


def _factor_larger(config: Any, factor: int) -> Iterator[Change]:
    parallel = config.parallel
    pipeline, tensor = (
        factor * parallel.pipeline_model_parallel_size,
        factor * parallel.tensor_model_parallel_size,
    )
    yield Change(
        "pipeline",
        f"--pipeline-model-parallel-size {pipeline} --pipeline-layout auto" + _given_layouts(config),
        lambda c: _without_layouts(
            _parallel(c, pipeline_model_parallel_size=pipeline, pipeline_layout="auto")
        ),
    )
    if tensor <= MAX_TENSOR_PARALLEL:
        yield Change(
            "tensor",
            f"--tensor-model-parallel-size {tensor}"
            + ("" if parallel.sequence_parallel else " --sequence-parallel"),
            lambda c: _parallel(c, tensor_model_parallel_size=tensor, sequence_parallel=True),
        )
    context = factor * parallel.context_parallel_size
    yield Change(
        "context", f"--context-parallel-size {context}", lambda c: _parallel(c, context_parallel_size=context)
    )


def _given_layouts(config: Any) -> str:
    return (
        " without explicit layouts"
        if any(one.pipeline_layout for one in (config.student, *config.teachers))
        else ""
    )


def _without_layouts(config: Any) -> Any:
    teachers = tuple(replace(teacher, pipeline_layout=None) for teacher in config.teachers)
    return replace(config, student=replace(config.student, pipeline_layout=None), teachers=teachers)


def _parallel(config: Any, **values: Any) -> Any:
    return replace(config, parallel=replace(config.parallel, **values))


def _training(config: Any, **values: Any) -> Any:
    return replace(config, training=replace(config.training, **values))
