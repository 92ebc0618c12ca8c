"""Benchmark packing: the engine's tokens per second on packs, and on the same documents in padded batches."""

from __future__ import annotations

import numpy as np

from mkd.plan.flops import distillation_flops
from mkd.platform import Platform
from tools.benchmarks.benchmark_report import Report, Requirement, table
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.step_benchmark import step_of
from tools.benchmarks.synthetic_documents import (
    ChatLengths,
    document_lengths,
    packed_batches,
    padded_batches,
    random_documents,
)

PACKED = "packed"
PADDED = {f"padded, batches of {size}": size for size in (1, 8)}
SAME_LOSS = {"float32": 1e-5, "bfloat16": 5e-3}
"""Relative differences of loss and gradient norm that rounding explains.

The differences are far larger if a document sees another one.
"""


def benchmark(
    machine: Machine, platform: Platform, settings: PairSettings, lengths: ChatLengths, num_documents: int
) -> Report:
    """Time an optimizer step over the same documents in every arm, and print the table."""
    random = np.random.default_rng(machine.seed)
    with parallel_context(platform, settings) as context:
        engine, plan = random_engine(settings, machine, context)
        student, teachers = plan.student.shape, [teacher.shape for teacher in plan.teachers]
        vocab = min(shape.vocab_size for shape in (student, *teachers))
        documents = random_documents(lengths.draw(num_documents, random), vocab, random)
        batches = {PACKED: packed_batches(documents, settings.seq_length)}
        batches |= {name: padded_batches(documents, size) for name, size in PADDED.items()}
        batches = {name: [batch.to(context.device) for batch in group] for name, group in batches.items()}
        results = {name: step_of(engine, group)() for name, group in batches.items()}
        arms = [Arm(name, step_of(engine, group)) for name, group in batches.items()]
        times = time_arms(arms, machine.device, machine.rounds, warmup=1)
    spans = {name: document_lengths(group, padded=True) for name, group in batches.items()}
    flops = {name: distillation_flops(student, teachers, lengths_of) for name, lengths_of in spans.items()}
    useful = distillation_flops(student, teachers, document_lengths(batches[PACKED]))
    tokens = sum(len(document) for document in documents)
    rows, requirements, wrong = [], [], []
    for name, group in batches.items():
        loss, norm = (_difference(results[name], results[PACKED], key) for key in ("loss", "grad_norm"))
        if not max(loss, norm) <= SAME_LOSS[str(machine.dtype)[6:]]:
            wrong.append(
                f"{name}: loss differs from the packed run's by {loss:.1e}, the gradient norm by {norm:.1e}"
            )
        fill = tokens / sum(batch.tokens.numel() for batch in group)
        gain, ideal = times[name] / times[PACKED], flops[name] / useful
        speed = [f"{times[name]:.1f}", f"{1000 * tokens / times[name]:.0f}", f"{gain:.2f}", f"{ideal:.2f}"]
        rows.append([name, str(len(group)), f"{fill:.3f}", *speed, f"{loss:.1e}", f"{norm:.1e}"])
        if name != PACKED:
            what = f"of the ideal speed-up over {name} ({gain:.2f} x)"
            requirements.append(Requirement("R9", gain / ideal, what, ">=", 0.90))
    title = f"packing {settings.student} <- {settings.teacher}, {num_documents} documents, {tokens} tokens"
    header = ["", "batches", "fill", "ms", "tokens/s", "slower", "ideal", "loss diff", "norm diff"]
    print(table(f"{title}, packs of {settings.seq_length}", header, rows))
    return Report(requirements, wrong, {f"{num_documents} documents, packs of {settings.seq_length}": times})


def _difference(result, reference, key: str) -> float:
    ours, theirs = (
        one.sums.token_sums()["loss"] / one.sums.num_loss_tokens if key == "loss" else one.grad_norm
        for one in (result, reference)
    )
    return abs(ours - theirs) / abs(theirs)
