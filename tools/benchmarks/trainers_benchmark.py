"""Benchmark the step beside what a user would run instead: the same documents, models and divergence."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mkd.data.batch import PackedBatch
from mkd.data.packing.best_fit import pack_pieces
from mkd.platform import Platform
from mkd.train.step import Engine
from tools.benchmarks import peers, trainers
from tools.benchmarks.benchmark_report import Report, Requirement, table
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.step_benchmark import step_of
from tools.benchmarks.synthetic_documents import ChatLengths, packed_batches, random_documents

MKD = "mkd, packs"
SAME = {
    "float32": 1e-4,
    "bfloat16": 2e-2,
}  # relative difference of loss and gradient norm that rounding explains
GIB = 2**30


@dataclass(frozen=True)
class Trial:
    """A way to train that was run: `memory` counts its models, optimizer state and peak, as if alone."""

    memory: int  # bytes
    result: tuple[float, float]  # loss, gradient norm
    ms: float | None  # time of a step
    mkd_ms: float | None  # mkd's, measured by turns with it


def benchmark(
    machine: Machine,
    platform: Platform,
    settings: PairSettings,
    lengths: ChatLengths,
    num_documents: int,
    padded_by: int,  # documents of a padded batch
) -> Report:
    """Check every peer's loss and gradient norm against mkd's, time those that agree, and print the table.

    Each is timed by turns with mkd, and freed before the next one: their optimizers do not fit one GPU
    together.
    """
    random = np.random.default_rng(machine.seed)
    with parallel_context(platform, settings) as context:
        before = _allocated(machine)
        engine, plan = random_engine(settings, machine, context)
        vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
        documents = random_documents(lengths.draw(num_documents, random), vocab, random)
        batches = [batch.to(context.device) for batch in packed_batches(documents, settings.seq_length)]
        mkd = _mkd_step(engine, batches)
        memory, result = _try(mkd, before, machine)
        trials, notes = {MKD: Trial(memory, result, None, None)}, []
        before = _allocated(machine)
        pair = trainers.build_pair(settings.student, settings.teacher, machine)
        models = _allocated(machine) - before
        for name, make in _peers(pair, documents, settings, machine, padded_by).items():
            try:
                trials[name] = _beside(Arm(MKD, mkd), make, result, models, machine)
            except peers.PeerMissing as error:
                notes.append(f"{name}: {error}")
            except Exception as error:  # a peer's failure is a finding, not an end
                reason = str(error).splitlines()[0][:160]
                notes.append(f"{name}: {type(error).__name__}: {reason}, not timed")
            pair.student.zero_grad(set_to_none=True)
            _empty_cache(machine)
    case = f"{settings.student} <- {settings.teacher}, {num_documents} documents"
    _print_table(case, sum(map(len, documents)), trials)
    print(*notes, sep="\n", end="\n" if notes else "")
    timed = {name: one for name, one in trials.items() if one.ms is not None}
    requirements = [
        Requirement("R13", one.ms / one.mkd_ms, f"times the speed of {name}", ">=", 1.0)
        for name, one in timed.items()
    ]
    times = {name: one.ms for name, one in timed.items()} | {MKD: _mkd_ms(trials)}
    return Report(requirements, times={case: times})


def _mkd_step(engine: Engine, batches: Sequence[PackedBatch]) -> trainers.Step:
    train = step_of(engine, batches)

    def step() -> tuple[float, float]:
        result = train()
        return result.sums.token_sums()["loss"] / result.sums.num_loss_tokens, result.grad_norm

    return step


def _try(step: trainers.Step, before: int, machine: Machine) -> tuple[int, tuple[float, float]]:
    """Run a step three times; return its peak of bytes above `before`, and loss and gradient norm."""
    step()
    held = _allocated(machine)
    if machine.is_cuda:
        torch.cuda.reset_peak_memory_stats(machine.device)
    step()
    peak = torch.cuda.max_memory_allocated(machine.device) if machine.is_cuda else held
    return peak - before, step()


def _beside(
    mkd: Arm,
    make: Callable[[], trainers.Step],
    reference: tuple[float, float],  # mkd's loss and gradient norm
    models: int,  # bytes of the peers' two models
    machine: Machine,
) -> Trial:
    """Try a peer's step and time it by turns with mkd's. Raises ValueError if it computes something else."""
    before = _allocated(machine) - models
    step = make()
    memory, result = _try(step, before, machine)
    worst = max(abs(a / b - 1) for a, b in zip(result, reference, strict=True))
    if not worst <= SAME[str(machine.dtype)[6:]]:
        raise ValueError(f"loss and gradient norm {result}, mkd's {reference}: not the same")
    times = time_arms([mkd, Arm("peer", step)], machine.device, machine.rounds, warmup=1)
    return Trial(memory, result, times["peer"], times[mkd.name])


def _mkd_ms(trials: dict[str, Trial]) -> float:
    return statistics.median([one.mkd_ms for one in trials.values() if one.mkd_ms is not None] or [math.nan])


def _print_table(case: str, tokens: int, trials: dict[str, Trial]) -> None:
    rows = []
    for name, one in trials.items():
        ms, ratio = (_mkd_ms(trials), 1.0) if one.ms is None else (one.ms, one.ms / one.mkd_ms)
        speed = [f"{ms:.0f}", f"{1000 * tokens / ms:.0f}", f"{ratio:.2f}"]
        results = [f"{value:.5f}" for value in one.result]
        rows.append([name, *speed, f"{one.memory / GIB:.1f}", *results])
    header = ["", "ms", "tokens/s", "time / mkd", "GiB", "loss", "grad norm"]
    print(table(f"trainers {case}, {tokens} tokens", header, rows))


def _peers(
    pair: trainers.Pair, documents: list[np.ndarray], settings: PairSettings, machine: Machine, padded_by: int
) -> dict[str, Callable[[], trainers.Step]]:
    """Return name -> a call that builds the step."""
    packs = pack_pieces(np.array([len(document) for document in documents]), settings.seq_length, "bfd")
    members = [
        [documents[i] for i in packs.piece_ids[first:last]]
        for first, last in zip(packs.offsets[:-1], packs.offsets[1:], strict=True)
    ]
    padded = trainers.padded_rows(documents, padded_by, machine.device)
    packed = trainers.packed_rows(members, machine.device)
    count = sum(len(document) - 1 for document in documents)
    loop, bf16 = trainers.loop_step, machine.dtype == torch.bfloat16
    found: dict[str, Callable[[], trainers.Step]] = {
        f"transformers, eager KL, padded by {padded_by}": lambda: loop(
            pair, padded, trainers.eager_kl, count
        ),
        "transformers, eager KL, packs": lambda: loop(pair, packed, trainers.eager_kl, count),
        f"TRL GKDTrainer, padded by {padded_by}": lambda: trainers.trl_step(pair, padded, count, bf16),
    }
    for name, rows in ((f"padded by {padded_by}", padded), ("packs", packed)):
        found[f"transformers, Liger chunked, {name}"] = lambda rows=rows: loop(
            pair, rows, trainers.liger_kl(1024, machine.compile), count
        )
    return found


def _allocated(machine: Machine) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(machine.device) if machine.is_cuda else 0


def _empty_cache(machine: Machine) -> None:
    gc.collect()
    if machine.is_cuda:
        torch.cuda.empty_cache()
