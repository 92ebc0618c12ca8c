"""Benchmark the step beside what a user would run instead: the same documents, models and divergence."""

from __future__ import annotations

import gc
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
PADDED = 2  # documents a batch: TRL's logits of 4 documents do not fit one GPU beside the models
SAME = {
    "float32": 1e-4,
    "bfloat16": 2e-2,
}  # relative difference of loss and gradient norm that rounding explains
GIB = 2**30


@dataclass(frozen=True)
class Trial:
    """An arm that was run: `memory` counts its models, optimizer state and peak, as if it ran alone."""

    step: trainers.Step
    memory: int  # bytes
    result: tuple[float, float]  # loss, gradient norm


def benchmark(
    machine: Machine, platform: Platform, settings: PairSettings, lengths: ChatLengths, num_documents: int
) -> Report:
    """Check every arm's loss and gradient norm against mkd's, time those that agree, and print the table."""
    random = np.random.default_rng(machine.seed)
    with parallel_context(platform, settings) as context:
        before = _allocated(machine)
        engine, plan = random_engine(settings, machine, context)
        vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
        documents = random_documents(lengths.draw(num_documents, random), vocab, random)
        batches = [batch.to(context.device) for batch in packed_batches(documents, settings.seq_length)]
        trials = {MKD: _trial(lambda: _mkd_step(engine, batches), before, machine)}
        before = _allocated(machine)
        pair = trainers.build_pair(settings.student, settings.teacher, machine)
        found, notes = _peer_trials(pair, documents, settings, before, machine)
        trials |= found
        limit = SAME[str(machine.dtype)[6:]]
        for name in [name for name, one in trials.items() if not _difference(one, trials[MKD]) <= limit]:
            results = f"loss and gradient norm {trials.pop(name).result}, mkd's {trials[MKD].result}"
            notes.append(f"{name}: {results}: not the same, not timed")
        arms = [Arm(name, one.step) for name, one in trials.items()]
        times = time_arms(arms, machine.device, machine.rounds, warmup=1)
    case = f"{settings.student} <- {settings.teacher}, {num_documents} documents"
    _print_table(case, sum(map(len, documents)), trials, times)
    print(*notes, sep="\n", end="\n" if notes else "")
    requirements = [
        Requirement("R13", ms / times[MKD], f"times the speed of {name}", ">=", 1.0)
        for name, ms in times.items()
        if name != MKD
    ]
    return Report(requirements, times={case: times})


def _mkd_step(engine: Engine, batches: Sequence[PackedBatch]) -> trainers.Step:
    train = step_of(engine, batches)

    def step() -> tuple[float, float]:
        result = train()
        return result.sums.token_sums()["loss"] / result.sums.num_loss_tokens, result.grad_norm

    return step


def _trial(make: Callable[[], trainers.Step], before: int, machine: Machine) -> Trial:
    """Build a step and run it three times; `before` bytes were allocated without the arm."""
    step = make()
    step()
    held = _allocated(machine)
    if machine.is_cuda:
        torch.cuda.reset_peak_memory_stats(machine.device)
    step()
    peak = torch.cuda.max_memory_allocated(machine.device) if machine.is_cuda else held
    return Trial(step, peak - before, step())


def _peer_trials(
    pair: trainers.Pair, documents: list[np.ndarray], settings: PairSettings, before: int, machine: Machine
) -> tuple[dict[str, Trial], list[str]]:
    """Return the trials of the peers, and a note for each that is missing or fails."""
    trials: dict[str, Trial] = {}
    notes = []
    models = _allocated(machine) - before
    for name, make in _peers(pair, documents, settings, machine).items():
        try:
            trials[name] = _trial(make, _allocated(machine) - models, machine)
        except peers.PeerMissing as error:
            notes.append(f"{name}: {error}")
        except Exception as error:  # a peer's failure is a finding, not an end
            notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}, skipped")
        pair.student.zero_grad(set_to_none=True)
        gc.collect()
    return trials, notes


def _difference(trial: Trial, reference: Trial) -> float:
    return max(abs(a / b - 1) for a, b in zip(trial.result, reference.result, strict=True))


def _print_table(case: str, tokens: int, trials: dict[str, Trial], times: dict[str, float]) -> None:
    rows = []
    for name, ms in times.items():
        speed = [f"{ms:.0f}", f"{1000 * tokens / ms:.0f}", f"{ms / times[MKD]:.2f}"]
        results = [f"{value:.5f}" for value in trials[name].result]
        rows.append([name, *speed, f"{trials[name].memory / GIB:.1f}", *results])
    header = ["", "ms", "tokens/s", "time / mkd", "GiB", "loss", "grad norm"]
    print(table(f"trainers {case}, {tokens} tokens", header, rows))


def _peers(
    pair: trainers.Pair, documents: list[np.ndarray], settings: PairSettings, machine: Machine
) -> dict[str, Callable[[], trainers.Step]]:
    """Return name -> a call that builds the step."""
    packs = pack_pieces(np.array([len(document) for document in documents]), settings.seq_length, "bfd")
    members = [
        [documents[i] for i in packs.piece_ids[first:last]]
        for first, last in zip(packs.offsets[:-1], packs.offsets[1:], strict=True)
    ]
    padded = trainers.padded_rows(documents, PADDED, machine.device)
    packed = trainers.packed_rows(members, machine.device)
    count = sum(len(document) - 1 for document in documents)
    loop, bf16 = trainers.loop_step, machine.dtype == torch.bfloat16
    found: dict[str, Callable[[], trainers.Step]] = {
        f"transformers, eager KL, padded by {PADDED}": lambda: loop(pair, padded, trainers.eager_kl, count),
        "transformers, eager KL, packs": lambda: loop(pair, packed, trainers.eager_kl, count),
        f"TRL GKDTrainer, padded by {PADDED}": lambda: trainers.trl_step(pair, padded, count, bf16),
    }
    for name, rows in ((f"padded by {PADDED}", padded), ("packs", packed)):
        found[f"transformers, Liger chunked, {name}"] = lambda rows=rows: loop(
            pair, rows, trainers.liger_kl(1024, machine.compile), count
        )
    return found


def _allocated(machine: Machine) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(machine.device) if machine.is_cuda else 0
