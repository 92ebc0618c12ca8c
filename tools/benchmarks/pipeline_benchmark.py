"""Benchmark the pipeline against the bubble formula.

It measures what schedule and messages cost beyond the stages' own time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from mkd.data.batch import PackedBatch
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import attach_teacher_hidden
from mkd.plan.times.bubble import balanced_bubble
from mkd.platform import Platform
from mkd.resolve.run_plan import Plan
from mkd.train.objective import Objective
from mkd.train.schedule import stage_inputs
from mkd.train.step import Engine, training_objective
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack


def benchmark(machine: Machine, platform: Platform, settings: PairSettings, lengths: ChatLengths) -> Report:
    """Time forward and backward of all micro-batches (no update) against `ideal / (1 - bubble)`. Collective.

    `ideal` is the time of all stages' own work on one micro-batch, without messages, x micro-batches / ranks.
    """
    if settings.pipeline_parallel == 1:
        return Report([Skipped("R11", "start it with torchrun and --pipeline-parallel 2 or more")])
    with parallel_context(platform, settings) as context:
        engine, plan = random_engine(settings, machine, context)
        random = np.random.default_rng(machine.seed)
        vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
        pack = full_pack(settings.seq_length, vocab, lengths, random).to(context.device)
        (batch,) = for_teachers([pack], len(engine.teachers))
        batches = [batch] * settings.num_microbatches  # equal work, as the formula assumes
        objective = training_objective(engine, batches)
        step = Arm("step", lambda: engine.schedule.run(engine.stages, batches, objective, forward_only=False))
        step_ms = time_arms([step], machine.device, machine.rounds)["step"]
        stage_ms = _stage_times(machine, engine, plan, batch, objective)
    ranks = settings.pipeline_parallel
    bubble = balanced_bubble(ranks, settings.num_microbatches, settings.virtual_stages)
    ideal_ms = settings.num_microbatches * sum(stage_ms) / ranks
    formula_ms = ideal_ms / (1 - bubble)
    if dist.get_rank() == 0:
        title = (
            f"pipeline {settings.student} <- {settings.teacher}, p = {ranks}, v = {settings.virtual_stages}, "
            f"m = {settings.num_microbatches} x {settings.seq_length} tokens"
        )
        by_rank = [sum(stage_ms[rank::ranks]) for rank in range(ranks)]
        balance = max(by_rank) * ranks / sum(by_rank)
        values = [f"{ms:.2f}" for ms in (step_ms, formula_ms, ideal_ms)]
        row = [*values, f"{1 - ideal_ms / step_ms:.3f}", f"{bubble:.3f}", f"{balance:.3f}"]
        header = ["step ms", "formula ms", "ideal ms", "bubble", "formula", "slowest / mean rank"]
        print(
            table(title, header, [row]), "stages, ms: " + ", ".join(f"{ms:.2f}" for ms in stage_ms), sep="\n"
        )
    requirement = Requirement("R11", step_ms / formula_ms, "of the bubble formula's step", "<=", 1.05)
    layout = (
        f"PP {ranks}, {settings.num_microbatches} micro-batches, {settings.virtual_stages} virtual stages"
    )
    return Report([requirement], times={layout: {"forward and backward": step_ms, "formula": formula_ms}})


def _stage_times(
    machine: Machine, engine: Engine, plan: Plan, batch: PackedBatch, objective: Objective
) -> list[float]:
    """Time forward + backward of one micro-batch on each stage alone, in ms and model order. Collective."""
    context = engine.context
    arms = [
        Arm(str(virtual_stage), stage_alone(chunk, virtual_stage, plan, batch, objective, machine))
        for virtual_stage, chunk in enumerate(engine.stages)
    ]
    own = torch.zeros(len(arms), dtype=torch.float64, device=context.device)
    for index, arm in enumerate(arms):
        own[index] = _own_time(arm, machine)
    every = [torch.empty_like(own) for _ in range(context.pp_size)]
    dist.all_gather(every, own, group=context.pp_group)
    return torch.stack(every, dim=1).flatten().tolist()  # [virtual stage, rank]: model order


def _own_time(arm: Arm, machine: Machine) -> float:
    """Return the median time of this rank alone, not the slowest rank's."""
    return time_arms([arm], machine.device, machine.rounds, across_ranks=False)[arm.name]


def stage_alone(
    chunk: nn.Module,
    virtual_stage: int,
    plan: Plan,
    batch: PackedBatch,
    objective: Objective,
    machine: Machine,
) -> Callable[[], None]:
    """Return a call that runs one micro-batch through one model part.

    Random tensors replace the messages.
    """
    context: ParallelContext = objective.context
    stage = get_attr_wrapped_model(chunk, "teachers", return_model_obj=True)
    shards = context.tp_size if stage.config.sequence_parallel else 1
    rows = batch.tokens.numel() // shards
    inputs = stage_inputs(batch, context.platform.transformer_engine)

    def message(width: int) -> Tensor:
        return torch.randn(rows, 1, width, device=context.device, dtype=machine.dtype)

    activation, teacher_hidden, gradient = (
        message(width)
        for width in (
            plan.student.shape.hidden_size,
            plan.teachers[0].shape.hidden_size,
            plan.student.shape.hidden_size,
        )
    )

    def run() -> None:
        if not context.is_first_stage(virtual_stage):
            stage.set_input_tensor(
                attach_teacher_hidden(activation.detach().requires_grad_(), [teacher_hidden])
            )
        output = chunk(*inputs)
        if context.is_last_stage(virtual_stage):
            objective(stage, batch, output)[0].backward()
        else:
            output.hidden.backward(gradient)

    return run
