"""Check that teacher forwards ahead of the student leave every bit of the training as it is."""

from __future__ import annotations

import pytest
import torch

from tests.train.invariance import DISTRIBUTED, PEERS, SP, UNEVEN, Layout, make_pair, microbatches

STEPS, SKIPPED = 4, 2
LAYOUTS = (
    Layout("PP2", 2, pp=2),
    Layout("PP4", 4, pp=4),
    Layout("PP2 uneven", 2, pp=2, flags=UNEVEN),
    Layout("TP2 PP2 + sequence parallel", 4, tp=2, pp=2, flags=SP),
    Layout("PP2 DP2, distributed", 4, pp=2, flags=DISTRIBUTED),
    Layout("PP2 DP2, teacher over 2 peers", 4, pp=2, flags=PEERS[2]),
    Layout("PP2 CP2", 4, pp=2, cp=2),
)
QUICK = {"PP2 uneven": (1, 4), "PP4": (8,), "PP2 DP2, teacher over 2 peers": (4,)}
"""Layout -> micro-batches ahead."""


def ahead(number: int | str) -> tuple[str, str]:
    return "--teacher-prefetch", str(number)


def build(layout: Layout, argv: list[str]):
    """Return (engine, models, batches of this rank)."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.run_plan import plan_run

    plan = plan_run(load_config(argv).config, layout.ranks)
    context = join(plan.config.parallel, plan.virtual_stages, detect(), 1)
    engine, state = build_engine(plan, context)
    return engine, state.models, microbatches(layout, context, len(engine.teachers))


def trained(engine, models, batches: list) -> tuple:
    """Return sums and norms of some steps and of an evaluation between them, and the weights at the end.

    Micro-batches come in another order in every step. The update of one step is skipped.
    """
    from mkd.evaluation.evaluate import evaluate
    from mkd.operations.stopping import StepAgreement, without_peers
    from mkd.train.step import train_step

    found, prefetch = [], engine.schedule.prefetch
    steps = [batches[step:] + batches[:step] for step in range(STEPS)]
    for step, now in enumerate(steps):
        following = steps[step + 1] if step + 1 < STEPS else ()
        exchange = without_peers if step != SKIPPED else lambda is_finite: StepAgreement(False)
        result = train_step(engine, now, exchange, following=following)
        found.append(result.sums.token_sums() | {"grad_norm": result.grad_norm})
        if prefetch is not None:
            assert prefetch.num_ahead == (prefetch.gaps.done if following else 0)
        if step == 1:
            found.append(evaluate(engine, [batches]).token_sums())
    with engine.parameters_gathered():
        return found, [p.detach().clone() for model in models for p in model.parameters()]


def assert_same(stock: tuple, other: tuple) -> None:
    assert stock[0] == other[0] and len(stock[0]) == STEPS + 1
    assert all(torch.equal(one, two) for one, two in zip(stock[1], other[1], strict=True))


def train_with_each(layout: Layout, student, teacher, numbers: tuple[int, ...]) -> None:
    """Train on this rank without forwards ahead, and with each number of them."""
    results = []
    for number in (0, *numbers):
        engine, models, batches = build(layout, layout.with_flags(ahead(number)).argv(student, teacher))
        assert (engine.schedule.prefetch is not None) == bool(number)
        results.append(trained(engine, models, batches))
        engine.context.close()
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one.name in QUICK], ids=lambda one: one.name)
def test_training_is_the_same_bit_for_bit(layout, pair, ranks):
    ranks.run(train_with_each, layout.ranks, layout, *pair, QUICK[layout.name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_every_layout_and_number(layout, pair, ranks):
    ranks.run(train_with_each, layout.ranks, layout, *pair, (1, 2, 4, 2 * layout.pp, 16))
