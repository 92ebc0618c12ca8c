"""Check that teacher forwards ahead of the student leave every bit of the training as it is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tests.train import cross_tokenizer_invariance as cross
from tests.train.command import flags, make_files, read_metrics
from tests.train.invariance import DISTRIBUTED, PEERS, SP, UNEVEN, Layout, make_pair, microbatches
from tests.train.processes import run_processes
from tests.train.test_teacher_peers import values

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
QUICK = {"PP2 uneven": (1, 4), "PP4": (8,)}
"""Layout -> micro-batches ahead. test_prefetch_default.py has a teacher over peers."""


def ahead(number: int | str) -> tuple[str, str]:
    return "--teacher-prefetch", str(number)


def build(layout: Layout, argv: list[str]):
    """Return (engine, models, batches of this rank)."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run

    plan = plan_run(load_config(argv).config, layout.ranks)
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
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
    held = states_held(prefetch)
    steps = [batches[step:] + batches[:step] for step in range(STEPS)]
    for step, now in enumerate(steps):
        following = steps[step + 1] if step + 1 < STEPS else ()
        exchange = without_peers if step != SKIPPED else lambda is_finite: StepAgreement(False)
        result = train_step(engine, now, exchange, following=following)
        found.append(result.sums.token_sums() | {"grad_norm": result.grad_norm})
        if prefetch is not None:
            assert prefetch.num_ahead == (prefetch.plan.done if following else 0)
        if step == 1:
            found.append(evaluate(engine, [batches]).token_sums())
    assert prefetch is None or 0 < max(held) <= prefetch.plan.ahead
    with engine.parameters_gathered():
        return found, [p.detach().clone() for model in models for p in model.parameters()]


def states_held(prefetch) -> list[int]:
    """Return a list, to which each teacher forward and each hand-over then adds the states on this rank."""
    found: list[int] = []

    def counting(method):
        def call(*args):
            result = method(*args)
            coming = len(result or ())  # received, not yet taken
            found.append(sum(map(len, (prefetch._inputs, prefetch._outputs, prefetch._finals))) + coming)
            return result

        return call

    if prefetch is not None:
        prefetch._run = counting(prefetch._run)
        receive = counting(prefetch.communicator.receive_states)
        prefetch.communicator.receive_states = receive
    return found


def assert_same(stock: tuple, other: tuple) -> None:
    assert stock[0] == other[0] and len(stock[0]) == STEPS + 1
    assert all(torch.equal(one, two) for one, two in zip(stock[1], other[1], strict=True))


@contextmanager
def every_message_waits() -> Iterator[None]:
    """Let a rank wait for each of its messages as soon as it has posted it, as if its device stopped it."""
    from mkd.parallel.pipeline import PipelineCommunicator

    def post_and_wait(communicator, **tensors):
        transfers = post(communicator, **tensors)
        for transfer in transfers.values():
            transfer.wait()  # gloo's send ends when its receiver has posted the receive
        return transfers

    post = PipelineCommunicator._post_batched
    PipelineCommunicator._post_batched = post_and_wait
    try:
        yield
    finally:
        PipelineCommunicator._post_batched = post


def train_with_each(layout: Layout, student, teacher, numbers: tuple[int, ...]) -> None:
    """Train on this rank without forwards ahead, and with each number of them.

    The first of them again in a run that waits for every message.
    """
    results = []
    for place, number in enumerate((0, *numbers, numbers[0])):
        engine, models, batches = build(layout, layout.with_flags(ahead(number)).argv(student, teacher))
        assert (engine.schedule.prefetch is not None) == bool(number)
        with every_message_waits() if place > len(numbers) else nullcontext():
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


def train_two_teachers(layout: Layout, files) -> None:
    """Train with a cross-tokenizer teacher in host memory, beside one on the device, ahead and not."""
    results = []
    for name, number in (("partition_kl", 0), ("residency", 4)):
        engine, state, batches, _ = cross.build(layout.with_flags(ahead(number)), files, name)
        results.append(trained(engine, state.models, batches))
        engine.context.close()
    assert_same(*results)


def test_several_teachers_go_ahead_together(ranks, tmp_path):
    files = cross.make_files(tmp_path)
    text = (files / "partition_kl.yaml").read_text(encoding="utf-8")
    text = text.replace('"name": "cross"', '"name": "cross", "residency": "host"')
    (files / "residency.yaml").write_text(text, encoding="utf-8")
    ranks.run(train_two_teachers, 2, Layout("PP2", 2, pp=2), files)


ITERATIONS, SIGNALLED = 7, 5


def train_to_the_end(argv: list[str], signalled: int | None = None) -> tuple[int, list]:
    """Run to the end or a stop; return (iteration, weights). Rank 0 has a signal in the step `signalled`."""
    from mkd.config.load import load_config
    from mkd.operations.phases import FORWARD_BACKWARD, Follower
    from mkd.operations.signals import Signals
    from mkd.platform import detect
    from mkd.run.loop import train
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    signals = Signals()

    class Scheduler(Follower):
        def entered(self, phase: str, iteration: int) -> None:
            if (phase, iteration) == (FORWARD_BACKWARD, signalled) and torch.distributed.get_rank() == 0:
                signals.received = signal.SIGTERM

    run = build_run(plan_run(load_config(argv).config, 2), detect(), signals)
    run.phase.follow(Scheduler())
    stop = train(run)
    run.reporter.close()
    assert (stop is not None) == (run.position.iteration == signalled)
    prefetch = run.engine.schedule.prefetch
    if prefetch is not None:
        assert prefetch.num_ahead == (prefetch.plan.done if stop else 0), "only a stop wastes forwards"
    return run.position.iteration, [p.detach().clone() for m in run.state.models for p in m.parameters()]


def test_a_run_evaluates_stops_and_resumes(ranks, tmp_path):
    """It ends at an exit interval and by a signal, and resumes; every bit is that of a run without stops."""
    files = make_files(tmp_path)
    more = ("--train-iters", ITERATIONS, "--eval-interval", 2, "--split", "80,20,0")
    more = (*more, "--pipeline-model-parallel-size", 2, "--pipeline-layout", "auto")
    saved = (*more, "--save", files / "save", "--load", files / "save", "--save-interval", 2)
    whole = ranks.run(train_to_the_end, 2, flags(files, "whole", *more, *ahead(0)))
    first = (*ahead(4), "--exit-interval", 3)
    parts = [
        ranks.run(train_to_the_end, 2, flags(files, "parts", *saved, *first)),
        ranks.run(train_to_the_end, 2, flags(files, "parts", *saved, *ahead("auto")), SIGNALLED),
        ranks.run(train_to_the_end, 2, flags(files, "parts", *saved, *ahead(3))),
    ]
    assert [part[0][0] for part in parts] == [3, SIGNALLED, ITERATIONS]
    for ours, theirs in zip(parts[-1], whole, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours[1], theirs[1], strict=True))
    records = [
        {
            (one["iteration"], "valid" in str(one.get("split"))): one["kd_loss"]
            for one in read_metrics(files / name)
        }
        for name in ("whole", "parts")
    ]
    common = records[0].keys() & records[1].keys()
    assert records[0] == {key: records[1][key] for key in common} and len(common) >= ITERATIONS + 4


@pytest.mark.slow
@pytest.mark.fault(17)
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_rank_that_hangs(hanging, tmp_path):
    """The watchdog ends both ranks, wherever the other one waits, and the run resumes to the same metrics."""
    files, limit_s = make_files(tmp_path), 4
    more = ("--train-iters", 6, "--pipeline-model-parallel-size", 2, "--pipeline-layout", "auto")
    limit = ("--distributed-timeout-seconds-after-init", limit_s)
    saved = {"save": "run/save", "load": "run/save"}
    argv = flags(files, "run", *more, *limit, *ahead(4), "--save-interval", 2, **saved)
    results = run_processes(tmp_path, argv, 2, fault=f"hang@in_step:{hanging}:5")
    assert [one.code for one in results] == [1, 1]
    last_step = (files / "run" / "metrics.jsonl").stat().st_mtime
    for rank, result in enumerate(results):
        report = (files / "run" / "errors" / f"rank_{rank}.txt").read_text()
        assert "in forward_backward of iteration 5 for" in report
        assert limit_s <= result.at - last_step <= limit_s + 2
    assert [one.code for one in run_processes(tmp_path, argv, 2)] == [0, 0]
    stock = flags(files, "whole", *more, *ahead(0))
    assert [one.code for one in run_processes(tmp_path, stock, 2)] == [0, 0]
    assert values(read_metrics(files / "run")) == values(read_metrics(files / "whole"))
