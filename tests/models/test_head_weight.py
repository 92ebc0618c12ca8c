"""Check that `head_weight` waits for the head's weight, which overlapped gathers deliver late."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from tests.train.invariance import DISTRIBUTED, OVERLAP, Layout, make_pair

STEPS = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a student whose head is a separate parameter, and a teacher."""
    sizes = dict(num_hidden_layers=2, tie_word_embeddings=False)
    return make_pair(tmp_path_factory.mktemp("head"), sizes)


class Late:
    """Handle of a gather that only starts when somebody waits for it: the latest possible communication."""

    def __init__(self, group):
        self.group = group

    def wait(self):
        self.group.param_gather_handle = None
        self.group.gather_now(force_sync=True)


def make_gathers_late(engine) -> int:
    """Give every parameter of this rank its own late gather; return their number."""
    groups = [group for chunk in engine.stages for group in chunk.bucket_groups]

    def start(group, force_sync=False):
        if force_sync:
            group.param_gather_handle = None
            group.gather_now(force_sync=True)
        elif group.param_gather_handle is None:
            group.param_gather_handle = Late(group)
        group.param_gather_dispatched = True

    for group in groups:
        group.gather_now = group.start_param_sync
        group.start_param_sync = lambda force_sync=False, group=group: start(group, force_sync)
    return len(groups)


def steps(student, teacher, flags, is_late, asks_the_module):
    """Return the loss of each step, the gradients of the last one and the updated weights on this rank."""
    from functools import partial

    from mkd.config.load import load_config
    from mkd.models.language_model import LanguageModel
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.plan_run import plan_run
    from mkd.train import optimizer
    from mkd.train.step import train_step
    from tests.train.invariance import microbatches

    layout = Layout("DP2", 2, flags=flags)
    plan = plan_run(load_config(layout.argv(student, teacher)).config, layout.ranks)
    context = ParallelContext.create(detect())
    ddp_config, head_weight = optimizer.DistributedDataParallelConfig, LanguageModel.head_weight
    # a bucket for every parameter
    optimizer.DistributedDataParallelConfig = partial(ddp_config, bucket_size=1)
    if not asks_the_module:
        LanguageModel.head_weight = lambda self: self.output_layer.weight
    try:
        engine, _ = build_engine(plan, context)
        if is_late:
            assert make_gathers_late(engine) > 10
        batches = microbatches(layout, context, len(engine.teachers))
        losses = [train_step(engine, batches).sums.token_sums()["loss"] for _ in range(STEPS)]
    finally:
        optimizer.DistributedDataParallelConfig, LanguageModel.head_weight = ddp_config, head_weight
    chunk = engine.stages[0]
    gradients = {name: one.main_grad.clone() for name, one in chunk.named_parameters()}
    with engine.parameters_gathered():
        weights = {name: one.detach().clone() for name, one in chunk.named_parameters()}
    with suppress(KeyError), engine.parameters_gathered():
        raise KeyError
    assert bool(chunk.remove_forward_pre_hook_handles) == ("--overlap-param-gather" in flags)
    return losses, gradients, weights


@pytest.fixture(scope="module")
def plain(pair, ranks):
    # the same buckets: the gradient norm adds up in one order
    flags = (*DISTRIBUTED, "--overlap-grad-reduce")
    return ranks.run(steps, 2, *pair, flags, False, True)


def equal(ours, theirs) -> bool:
    """Return True if all ranks have the same bits; gradients count in the shard that the rank reduces to."""
    same = [
        mine[0] == other[0] and all(torch.equal(mine[2][name], other[2][name]) for name in other[2])
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return all(same)


@pytest.mark.parametrize("is_late", [False, True])
def test_overlapped_gathers_give_the_same_bits(is_late, pair, plain, ranks):
    overlapped = ranks.run(steps, 2, *pair, OVERLAP, is_late, True)
    assert equal(overlapped, plain)
    head = "module.student.output_layer.weight"
    for (_, ours, _), (_, theirs, _) in zip(overlapped, plain, strict=True):
        assert ours.keys() == theirs.keys() and head in theirs and theirs[head].abs().max() > 0
    for shard, ((_, ours, _), (_, theirs, _)) in enumerate(zip(overlapped, plain, strict=True)):
        for name in theirs:
            mine, other = (one[name].flatten().chunk(2)[shard] for one in (ours, theirs))
            assert torch.equal(mine, other), name


def test_the_weight_without_the_hook_is_an_old_one(pair, plain, ranks):
    """Check that the test above can fail: read past its module, the head's weight misses others' updates."""
    without_hook = ranks.run(steps, 2, *pair, OVERLAP, True, False)
    assert without_hook[0][0][0] == plain[0][0][0], "the first step has nothing to gather"
    assert without_hook[0][0][1] != plain[0][0][1] and not equal(without_hook, plain)
