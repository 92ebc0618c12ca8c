"""Check records in and out of a stage in real steps: an extra input, an auxiliary loss, a feature."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.train.invariance import Layout, make_pair, microbatches

COEFFICIENT = 0.3
LAYOUTS = (
    Layout("DP2", 2),
    Layout("PP2", 2, pp=2),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("CP2", 2, cp=2),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("stage"))


def gated_stage(coefficient):
    """Return a class of stages that multiply the final hidden state by an extra and add a loss."""
    from mkd.models.stage import DistillationStage

    class GatedStage(DistillationStage):
        auxiliary_names = ("size",)

        def forward(self, student, teachers=()):
            output = super().forward(student, teachers)
            if not self.post_process:
                return output
            hidden = output.hidden * student.extras["gate"].view(-1, 1, 1)
            size = coefficient * student.extras["scale"] * hidden.square().mean(dim=-1).sum()
            return replace(output, hidden=hidden, auxiliary_losses={"size": size}, features={"gated": hidden})

    return GatedStage


def with_extras(batches):
    """Return the batches with a gate for every position and a number for all of them."""
    from mkd.data.batch import Extra, whole

    changed = []
    for batch in batches:
        # A function of the token, so that every layout cuts it alike; padding is in no loss.
        gate = (1 + batch.tokens.float() / 1000) * (batch.loss_mask > 0)
        extras = {"gate": Extra(gate), "scale": Extra(torch.tensor(2.0), whole)}
        changed.append(replace(batch, extras=extras))
    return changed


def build(layout, student, teacher, coefficient=COEFFICIENT):
    """Return (context, engine) whose stages are gated."""
    from mkd.config.load import load_config
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect
    from mkd.run import build_engine as builder
    from mkd.run.run_plan import plan_run

    plan = plan_run(load_config(layout.argv(student, teacher)).config, layout.ranks)
    context = ParallelContext.create(
        detect(), pipeline_parallel=layout.pp, virtual_stages=layout.vp, context_parallel=layout.cp
    )
    original, stage = builder.join_stages, gated_stage(coefficient)

    def join_stages(students, teachers):
        return [stage(one, [parts[i] for parts in teachers]) for i, one in enumerate(students)]

    builder.join_stages = join_stages
    try:
        return context, builder.build_engine(plan, context)[0]
    finally:
        builder.join_stages = original


def gated_step(layout, student, teacher):
    """Return the sums and the gradient norm of one step, and the sums of an evaluation before it."""
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step

    context, engine = build(layout, student, teacher)
    batches = with_extras(microbatches(layout, context, len(engine.teachers)))
    evaluation = evaluate(engine, [batches]).token_sums()
    result = train_step(engine, batches)
    return {**result.sums.token_sums(), "grad_norm": result.grad_norm}, evaluation


@pytest.fixture(scope="module")
def single(pair, ranks):
    (found,) = ranks.run(gated_step, 1, Layout("one"), *pair)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_auxiliary_loss_and_extras_under_every_layout(layout, single, pair, ranks):
    for found in ranks.run(gated_step, layout.ranks, layout, *pair):
        for ours, theirs in zip(found, single, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_auxiliary_loss_reaches_loss_and_report(single):
    for sums in single:
        mixed = 0.5 * sums["ce"] + 0.5 * sums["kd"]
        assert sums["auxiliary_loss/size"] > 0.01 * mixed
        assert sums["loss"] == pytest.approx(mixed + sums["auxiliary_loss/size"], rel=1e-12)


def auxiliary_gradient(student, teacher, coefficient):
    """Return two gradients of the final norm's weight: of a whole step, and of the auxiliary loss alone.

    The latter comes from autograd.
    """
    from mkd.train.stage_inputs import stage_inputs
    from mkd.train.step import training_objective

    context, engine = build(Layout("one"), student, teacher, coefficient)
    batches = with_extras(microbatches(Layout("one"), context, len(engine.teachers)))
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    stage = engine.stages[0].module
    weight = stage.student.decoder.final_layernorm.weight
    of_step = weight.main_grad.clone()
    outputs = [stage(*stage_inputs(batch, padding_joins_document=False)) for batch in batches]
    total = sum(output.auxiliary_losses["size"] for output in outputs)
    mean = total / sum(batch.num_loss_tokens for batch in batches)
    return of_step, torch.autograd.grad(mean, weight)[0]


def test_gradient_of_an_auxiliary_loss(pair, ranks):
    ((with_loss, alone),), ((without, nothing),) = (
        ranks.run(auxiliary_gradient, 1, *pair, coefficient) for coefficient in (COEFFICIENT, 0.0)
    )
    assert alone.abs().max() > 1e-3 and not nothing.any()
    torch.testing.assert_close(with_loss - without, alone, rtol=1e-4, atol=1e-6)


def feature_step(student, teacher, weight):
    """Return (sums, gradient norm) of a step whose teacher adds a loss of a feature."""
    from mkd.train.step import train_step
    from mkd.train.teachers.same_tokens import SameTokens

    @dataclass(frozen=True)
    class WithFeatures(SameTokens):
        """Teacher whose loss also keeps the features small."""

        def loss(self, given, scale):
            loss, sums = super().loss(given, scale)
            more = weight * given.output.features["gated"].square().sum()
            return loss + more, replace(sums, kd=sums.kd + more / self.kd_ratio)

    context, engine = build(Layout("one"), student, teacher, 0.0)
    engine = replace(engine, teachers=tuple(WithFeatures(**vars(one)) for one in engine.teachers))
    batches = with_extras(microbatches(Layout("one"), context, len(engine.teachers)))
    result = train_step(engine, batches)
    return result.sums.token_sums(), result.grad_norm


def test_a_teacher_reads_a_feature(pair, ranks):
    ((plain, plain_norm),), ((more, more_norm),) = (ranks.run(feature_step, 1, *pair, w) for w in (0.0, 0.01))
    assert more["ce"] == plain["ce"] and more["kd"] > 1.01 * plain["kd"] and more_norm != plain_norm
    assert more["loss"] == pytest.approx(0.5 * more["ce"] + 0.5 * more["kd"], rel=1e-12)
