"""Check the length of a run, its learning-rate schedule and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.errors import UsageError
from mkd.plan.facts import RunFacts


def check_length(facts: RunFacts) -> Iterator[UsageError]:
    """Check that the run has a step."""
    train_iters = facts.config.training.train_iters
    if train_iters < 1:
        what = f"train-iters is {train_iters}"
        why = "a run needs at least one step"
        yield UsageError(what, why, "give --train-iters N", code="add-flag")


def check_schedule(facts: RunFacts) -> Iterator[UsageError]:
    """Check that warm-up and decay of the learning rate fit each other."""
    settings = facts.config.optimizer
    decay_iters = settings.lr_decay_iters or facts.config.training.train_iters
    if settings.min_lr > settings.lr >= 0:
        what = f"min-lr {settings.min_lr} is above lr {settings.lr}"
        yield UsageError(what, "lr decays down to min-lr", "lower --min-lr", code="numbers-contradict")
    if 0 < decay_iters <= settings.lr_warmup_iters:
        what = f"lr-warmup-iters {settings.lr_warmup_iters} is not below the {decay_iters} decay iterations"
        why = "the learning rate would never start to decay"
        do = "lower --lr-warmup-iters, or raise --lr-decay-iters or --train-iters"
        yield UsageError(what, why, do, code="numbers-contradict")
    if settings.lr_decay_style == "WSD" and settings.lr_wsd_decay_iters is None:
        what = "lr-decay-style WSD needs lr-wsd-decay-iters"
        why = "it is the length of the last phase"
        yield UsageError(what, why, "give --lr-wsd-decay-iters N", code="add-flag")


def check_recomputation(facts: RunFacts) -> Iterator[UsageError]:
    """Check that full recomputation has all of its settings, and nothing else has them."""
    training = facts.config.training
    names = "recompute_method", "recompute_num_layers"
    given = [name for name in names if getattr(training, name) is not None]
    if training.recompute_granularity == "full" and len(given) < 2:
        what = "recompute-granularity full needs recompute-method and recompute-num-layers"
        do = "add for example --recompute-method uniform --recompute-num-layers 1"
        yield UsageError(what, "they select the layers to recompute", do, code="add-flag")
    if training.recompute_granularity != "full" and given:
        what = f"{' and '.join(given).replace('_', '-')} would have no effect"
        why = "only recompute-granularity full recomputes whole layers"
        examples = zip(names, ("--recompute-method uniform", "--recompute-num-layers 1"), strict=True)
        more = [example for name, example in examples if name not in given]
        do = f"add {' '.join(['--recompute-granularity full', *more])}, or remove them"
        yield UsageError(what, why, do, code="remove-flag")
