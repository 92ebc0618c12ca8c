"""Record the last stage's inputs in a real engine, and compute several teachers' losses in dense float64."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mkd.losses import KDObjective
from mkd.losses.dense_reference import dense_kd
from tests.losses.objectives import objective_of
from tests.tiny_models import make_model
from tests.train.invariance import Layout, make_pair, microbatches

VOCAB_SIZES = (307, 330, 320)  # student and both teachers


@dataclass(frozen=True)
class Recorded:
    """One micro-batch on the last stage."""

    hidden: Tensor  # [t, h_s], final, of the student
    teacher_hiddens: list[Tensor]  # each [t, h_i], final, of a teacher
    labels: Tensor  # [t]
    mask: Tensor  # [t]
    num_packs: int
    loss: float
    gradient: Tensor  # [t, h_s], of `hidden`


def make_files(folder: Path) -> Path:
    """Make the student and first teacher of the invariance table, and a second teacher."""
    make_pair(folder)
    make_model(folder / "second", "qwen2", seed=5, vocab_size=VOCAB_SIZES[2], num_hidden_layers=8)
    return folder


def write_config(folder: Path, *more: dict) -> Path:
    """Write a configuration with both teachers; `more` are settings of each."""
    names = ("teacher", "second")
    teachers = [{"hf": str(folder / name), **of} for name, of in zip(names, more or ({}, {}), strict=True)]
    path = folder / "teachers.yaml"
    path.write_text(json.dumps({"student": {"hf": str(folder / "student")}, "teachers": teachers}))
    return path


def build(layout: Layout, config: Path):
    """Return (context, engine) of the layout, with the teachers of the file."""
    from mkd.config.load import load_config
    from mkd.parallel.context import ParallelContext
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.plan_run import plan_run

    argv = layout.argv(config.parent / "student", config)[4:] + ["--config", str(config)]
    plan = plan_run(load_config(argv).config, layout.ranks)
    context = ParallelContext.create(
        detect(), Sizes(tensor=layout.tp, pipeline=layout.pp), virtual_stages=layout.vp
    )
    return context, build_engine(plan, context)[0]


def record_layout(layout: Layout, config: Path):
    """Return `record` of the fixed global batch."""
    context, engine = build(layout, config)
    return record(engine, microbatches(layout, context, num_teachers=2))


def record(engine, batches: list):
    """Return each micro-batch's `Recorded` values, all LM heads, the student head's gradient, sums, weights.

    For one process. Nothing is replaced: the schedule gets an objective that differentiates by the final
    hidden states, and then asks for the weights of each teacher.
    """
    from mkd.train.step import training_objective

    engine.optimizer.zero_grad()
    recorder = _Recorder(training_objective(engine, batches))
    total = engine.schedule.run(engine.stages, batches, recorder, forward_only=True)
    stage = engine.stages[0].module
    head = stage.student.head_weight()
    heads = [model.head_weight().detach() for model in (stage.student, *stage.teachers)]
    return recorder.recorded, heads, head.main_grad.clone(), recorder.objective.sums(total), recorder.weights


class _Recorder:
    def __init__(self, objective):
        self.objective, self.context, self.num_sums = objective, objective.context, objective.num_sums
        self.recorded, self.weights = [], []

    def __call__(self, stage, batch, output):
        """Differentiate by the final hidden state alone."""
        leaf = output.hidden.detach().requires_grad_()
        own = replace(output, hidden=leaf)
        loss, tokens, sums = self.objective(stage, batch, own)
        loss.backward()
        weights = self.objective._loss_input(stage, batch, own).pack_weights
        self.weights.append(torch.stack(list(weights.values())) if weights else None)
        states, count = [one.squeeze(1) for one in output.teacher_hiddens], len(batch.sample_ids)
        values = leaf.detach().squeeze(1), states, batch.labels[0], batch.loss_mask[0], count
        # a plain tuple: this module has another name on ranks
        self.recorded.append((*values, loss.item(), leaf.grad.squeeze(1)))
        return loss.detach(), tokens, sums


def logits_of(states: Tensor, head: Tensor, vocab_size: int) -> Tensor:
    return states.double() @ head.double()[:vocab_size].T


def dense_weights(
    recorded: Recorded, heads: list[Tensor], metric: str, shares, temperature: float = 1.0
) -> Tensor:
    """Return [teachers, k] float64: `select`, or softmax(ln share - metric / temperature)."""
    values = []
    for states, head, size in zip(recorded.teacher_hiddens, heads[1:], VOCAB_SIZES[1:], strict=True):
        log_p = logits_of(states, head, size).log_softmax(1)
        of_row = {
            "ce": -log_p.gather(1, recorded.labels.clamp(max=size - 1)[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(1),
            "confidence": 1 - log_p.exp().amax(1),
        }["ce" if metric == "select" else metric]
        mask = recorded.mask.view(recorded.num_packs, -1).double()
        values.append((of_row.view_as(mask) * mask).sum(1) / mask.sum(1).clamp(min=1))
    values = torch.stack(values)
    if metric == "select":
        return (values == values.amin(0)).double()
    return torch.softmax(torch.tensor(shares).double().log()[:, None] - values / temperature, dim=0)


def dense_loss(
    recorded: Recorded,
    hidden: Tensor,
    heads: list[Tensor],
    weights: Tensor,
    settings: list[dict],
    ratio: float,
):
    """Return loss, and weighted divergence and weight of each teacher, float64.

    They are sums over the loss tokens of a micro-batch.
    """
    student, labels = logits_of(hidden, heads[0], VOCAB_SIZES[0]), recorded.labels
    ce_only = KDObjective(VOCAB_SIZES[0], kd_ratio=0.0)
    total = (1 - ratio) * dense_kd(student, None, labels, recorded.mask, ce_only).loss
    parts = []
    for i, states in enumerate(recorded.teacher_hiddens):
        teacher, size = logits_of(states, heads[1 + i], VOCAB_SIZES[1 + i]), VOCAB_SIZES[1 + i]
        row_weights = recorded.mask * weights[i].repeat_interleave(len(labels) // recorded.num_packs)
        sizes = dict(student_vocab_size=VOCAB_SIZES[0], teacher_vocab_size=size)
        output = dense_kd(
            student, teacher, labels, row_weights, objective_of(kd_ratio=1.0, **sizes, **settings[i])
        )
        total = total + ratio * output.loss
        parts.append((output.kd, row_weights.sum()))
    return total, parts
