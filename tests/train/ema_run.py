"""Run a teacher that averages the student's weights, and average in float64 what the optimizer has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tests.train.command import write_records
from tests.train.context_run import HINT, NUM_RECORDS, argv, backward, record_of
from tests.train.invariance import export_gradients

RATE, UPDATES, LR, EPS = 0.3, 3, 0.05, 1.0  # with a large epsilon, updates are smooth in the gradient
SMOOTH = ("--lr", LR, "--adam-eps", EPS, "--lr-decay-style", "constant", "--weight-decay", 0)
SMOOTH = (*SMOOTH, "--clip-grad", 0)


def ema_argv(files: Path, run: str, *more: object, teachers: Sequence[dict] = ({},)) -> list[str]:
    """Return the command line of a run whose teachers average the student's weights, each after a context.

    Its steps have all records.
    """
    path, context = files / f"{run.replace(' ', '-')}.yaml", {"user": HINT, "missing": "skip"}
    usual = {"weights": "ema", "name": "knows", "context": context, "ema": {"rate": RATE}}
    given = [{key: value for key, value in (usual | one).items() if value is not None} for one in teachers]
    path.write_text(json.dumps({"teachers": given}))
    if not any("context" in one for one in given):  # nothing may read the contexts that records have
        own = (record_of(i) for i in range(NUM_RECORDS) if i % 4 != 3)
        more = (*more, "--data-path", write_records(files / "plain.jsonl", *own))
    return argv(files, run, *more, config=path)


def average_updates(arguments: list[str], out_dir: Path) -> dict:
    """Make updates, then export the gradients of one more step; return its sums and the average's errors."""
    run = build(arguments)
    found = follow(run)
    student = Path(arguments[arguments.index("--student-hf") + 1])
    found["sums"] = export_gradients(run.engine, run.state, run.data.train.next_step(), student, out_dir)
    run.reporter.close()
    return found


def averages_alone(arguments: list[str], updates: int) -> dict:
    """Make updates and a skipped one; return the errors of all averages."""
    run = build(arguments)
    found = follow(run, updates)
    before = [[twin.clone() for twin in one.values()] for one in twins_of(run)]
    assert not run.engine.optimizer.update(float("nan")).agreed.finite
    after = [list(one.values()) for one in twins_of(run)]
    assert all(map(torch.equal, sum(before, []), sum(after, [])))
    assert {one.updates for one in run.engine.optimizer.averages} == {updates}
    run.reporter.close()
    rewards = getattr(run.data.train, "rewards", None)
    if rewards is not None:
        rewards.calls.close()
    return found


def build(arguments: list[str]):
    """Build the run of a command line."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    return build_run(plan_run(load_config(arguments).config, torch.distributed.get_world_size()), detect())


def follow(run, updates: int = UPDATES) -> dict:
    """Make updates, average the main weights in float64, and return how the teachers differ from that."""
    from mkd.train.step import train_step

    averages = twins_of(run)
    settings = [one.ema for one in run.config.teachers if one.ema is not None]
    references = [{one: one.detach().double() for one in twins} for twins in averages]
    for twins in averages:
        assert all(torch.equal(one, twin) for one, twin in twins.items())
    for update in range(1, updates + 1):
        assert train_step(run.engine, run.data.train.next_step()).is_applied
        main = main_weights(run.engine)
        for reference, ema in zip(references, settings, strict=True):
            for one in reference if update % ema.every == 0 else ():
                reference[one].lerp_(main[one].double(), ema.rate)
    pairs = [
        (one, twin, reference[one])
        for twins, reference in zip(averages, references, strict=True)
        for one, twin in twins.items()
    ]
    errors = [float((twin.double() - own).abs().max() / (own.abs().max() + 1e-30)) for _, twin, own in pairs]
    return {
        "wrong": sum(int((twin != own.to(twin.dtype)).sum()) for _, twin, own in pairs),
        "moved": sum(int((twin != one).sum()) for one, twin, _ in pairs),
        "of": sum(twin.numel() for _, twin, _ in pairs),
        "error": max(errors),
    }


def twins_of(run) -> list[dict[nn.Parameter, nn.Parameter]]:
    """Return parameter of the student -> that of each teacher that averages, for all that it learns."""
    numbers = [index for index, one in enumerate(run.config.teachers) if one.ema is not None]
    found: list[dict[nn.Parameter, nn.Parameter]] = [{} for _ in numbers]
    for stage in run.engine.stages:
        for twins, number in zip(found, numbers, strict=True):
            known = dict(stage.module.teachers[number].named_parameters())
            own = stage.module.student.named_parameters()
            twins |= {one: known[name] for name, one in own if one.requires_grad}
    return found


def main_weights(engine) -> dict[nn.Parameter, torch.Tensor]:
    """Return the whole main weight of each parameter by Megatron's own gathering, fp32. Collective."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found = {one: one.detach() for stage in engine.stages for one in stage.parameters() if one.requires_grad}
    for inner in engine.optimizer.optimizer.chained_optimizers:
        if isinstance(inner, DistributedOptimizer):
            state = inner.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
            for number, buffer in enumerate(inner.buffers):
                (whole,) = state[number].values()
                for one, (first, end, _) in buffer.param_index_map.items():
                    found[one] = whole["param"][first:end].view(one.shape)
        elif hasattr(inner, "float16_groups"):
            for own, main in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
                found |= dict(zip(own, main, strict=True))
    return found


def dense_reference(files: Path, out_dir: Path) -> dict[str, float]:
    """Do the same with transformers and AdamW in float64; return the losses of the last step."""
    from tests.train.hf_gradients import load

    student, teacher = load(files / "student"), load(files / "student").requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, eps=EPS, betas=(0.9, 0.999), weight_decay=0)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        backward(files, student, teacher)
        optimizer.step()
        for own, average in zip(student.parameters(), teacher.parameters(), strict=True):
            average.data.mul_(1 - RATE).add_(own.data, alpha=RATE)
    optimizer.zero_grad()
    found = backward(files, student, teacher)
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return found
