"""Benchmark the step beside what a user would run instead: the same documents, models and divergence."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from mkd.data.packing import pack_pieces
from mkd.platform import Platform
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


def benchmark(
    machine: Machine, platform: Platform, settings: PairSettings, lengths: ChatLengths, num_documents: int
) -> Report:
    """Check every arm's loss against mkd's, time all, and print the table.

    The memory of an arm counts its models, optimizer state and the peak of its step, as if it ran alone.
    """
    random = np.random.default_rng(machine.seed)
    with parallel_context(platform, settings) as context:
        before = _allocated(machine)
        engine, plan = random_engine(settings, machine, context)
        shapes = plan.student.shape, plan.teachers[0].shape
        vocab = min(shape.vocab_size for shape in shapes)
        documents = random_documents(lengths.draw(num_documents, random), vocab, random)
        batches = [batch.to(context.device) for batch in packed_batches(documents, settings.seq_length)]
        train = step_of(engine, batches)

        def mkd() -> tuple[float, float]:
            result = train()
            return result.sums.token_sums()["loss"] / result.sums.num_loss_tokens, result.grad_norm

        steps: dict[str, trainers.Step] = {MKD: mkd}
        own = {MKD: lambda: _allocated(machine) - before}
        memory = {MKD: _memory(mkd, own[MKD], machine)}
        base = _allocated(machine)
        pair = trainers.build_pair(settings.student, settings.teacher, machine)
        models = _allocated(machine) - base
        found, notes = _peers(pair, documents, settings, machine)
        results = {MKD: mkd()}
        for name, make in found.items():
            held = _allocated(machine)
            try:
                step = make()
                memory[name] = _memory(step, lambda held=held: models + _allocated(machine) - held, machine)
                results[name], steps[name] = step(), step
            except peers.PeerMissing as error:
                notes.append(f"{name}: {error}")
            except Exception as error:  # a peer's failure is a finding, not an end
                notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}, skipped")
            pair.student.zero_grad(set_to_none=True)
            gc.collect()
        for name, result in results.items():
            off = max(abs(a / b - 1) for a, b in zip(result, results[MKD], strict=True))
            if not off <= SAME[str(machine.dtype)[6:]]:
                notes.append(f"{name}: loss and gradient norm {result}, mkd's {results[MKD]}: not timed")
                steps.pop(name)
        times = time_arms(
            [Arm(name, step) for name, step in steps.items()], machine.device, machine.rounds, warmup=1
        )
    tokens = sum(map(len, documents))
    rows = [
        [
            name, f"{ms:.0f}", f"{1000 * tokens / ms:.0f}", f"{ms / times[MKD]:.2f}",
            f"{memory[name] / GIB:.1f}", *(f"{value:.5f}" for value in results[name]),
        ]
        for name, ms in times.items()
    ]  # fmt: skip
    title = f"trainers {settings.student} <- {settings.teacher}, {num_documents} documents, {tokens} tokens"
    print(
        table(title, ["", "ms", "tokens/s", "time / mkd", "GiB", "loss", "grad norm"], rows), *notes, sep="\n"
    )
    requirements = [
        Requirement("R13", ms / times[MKD], f"times the speed of {name}", ">=", 1.0)
        for name, ms in times.items()
        if name != MKD
    ]
    return Report(
        requirements, (), {f"{settings.student} <- {settings.teacher}, {num_documents} documents": times}
    )


def _peers(pair, documents, settings: PairSettings, machine: Machine):
    """Return name -> a call that builds the step, and notes about what is missing."""
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
    return found, []


def _allocated(machine: Machine) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(machine.device) if machine.is_cuda else 0


def _memory(step: trainers.Step, own: Callable[[], int], machine: Machine) -> int:
    """Run two steps; return what the arm holds after the first, and what the second adds at its peak."""
    step()
    held = own()
    if not machine.is_cuda:
        step()
        return held
    torch.cuda.reset_peak_memory_stats(machine.device)
    before = torch.cuda.memory_allocated(machine.device)
    step()
    return held + torch.cuda.max_memory_allocated(machine.device) - before
