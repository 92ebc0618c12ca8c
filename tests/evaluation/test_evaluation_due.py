"""Check when held-out data are evaluated.

A run that was stopped makes the evaluations that were due when it resumes, and none of them twice.
"""

from __future__ import annotations

import signal

import pytest

from mkd.config.schema import TrainingConfig
from mkd.evaluation.evaluate import is_evaluated
from tests.evaluation.eval_reference import write_tasks
from tests.train.command import flags, make_files, read_metrics, run_main

STEPS = 4
CLOCK = {"step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("evaluate"))
    write_tasks(folder)
    return folder


def command(files, run, *more):
    tasks = ("--eval-completions", files / "foxes.jsonl", "--eval-multiple-choice", files / "animals.jsonl")
    evaluated = ("--split", "50,50,0", "--eval-interval", 2, "--eval-iters", 3, *tasks, "--seq-length", 128)
    return flags(
        files, run, "--train-iters", STEPS, *evaluated, "--save", files / run, "--load", files / run, *more
    )


def stopped(argv, iteration, where):
    """Run until SIGTERM in the evaluation after `iteration` steps, or just before it.

    Return (why the run ended, what is still due).
    """
    from mkd.config.load import load_config
    from mkd.operations.cleanup import Cleanup
    from mkd.operations.signals import Signals
    from mkd.platform import detect
    from mkd.run.loop import train
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    signals = Signals()

    def told_before(call, is_now):
        def wrapped(*args):
            if is_now():
                signals.received = signal.SIGTERM
            return call(*args)

        return wrapped

    class Batches:
        """Batches of the held-out text; the signal comes with the second one."""

        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            for index, batch in enumerate(self.batches):
                if index == 1 and run.position.iteration == iteration:
                    signals.received = signal.SIGTERM
                yield batch

    with Cleanup() as cleanup:
        run = build_run(plan_run(load_config(argv).config, 1), detect(), signals, cleanup=cleanup)
        if where == "before":
            in_step = lambda: run.position.iteration == iteration - 1  # noqa: E731
            run.data.train.next_step = told_before(run.data.train.next_step, in_step)
        elif where == "in text":
            run.data.valid = Batches(run.data.valid)
        else:
            run.reporter.valid = told_before(run.reporter.valid, lambda: run.position.iteration == iteration)
        stop = train(run)
    return stop and stop.reason, run.position.iteration, sorted(run.progress.due)


def records(folder):
    """Return the records without values that depend on the machine."""
    return [
        {key: value for key, value in record.items() if key not in CLOCK} for record in read_metrics(folder)
    ]


@pytest.fixture(scope="module")
def whole(files, ranks):
    (result,) = run_main(ranks, command(files, "whole"))
    assert result.exit_code == 0, result.stderr
    return records(files / "whole")


@pytest.mark.parametrize(
    ("iteration", "where", "due"),
    [
        (2, "before", ["tasks", "valid"]),
        (2, "in text", ["tasks", "valid"]),
        (2, "in tasks", ["tasks"]),
        (STEPS, "before", ["tasks", "valid"]),
        (STEPS, "in text", ["tasks", "valid"]),
        (STEPS, "in tasks", ["tasks"]),
    ],
)
@pytest.mark.fault(13)
def test_the_rest_of_an_evaluation_is_made_when_the_run_goes_on(iteration, where, due, files, whole, ranks):
    """The records equal those of a run that was never stopped, bit for bit."""
    run = f"{where} {iteration}"
    assert ranks.run(stopped, 1, command(files, run), iteration, where) == [
        ("received SIGTERM", iteration, due)
    ]
    assert (files / run / f"iter_{iteration:07d}").is_dir() and not (files / run / "DONE").exists()
    assert len(records(files / run)) == {2: 6, STEPS: len(whole)}[iteration] - len(due)
    for _ in range(2):  # the second time nothing is left to do
        (result,) = run_main(ranks, command(files, run))
        assert result.exit_code == 0, result.stderr
        assert records(files / run) == whole
    assert (files / run / "DONE").exists()


def test_the_evaluation_before_the_first_step(files, whole, ranks):
    assert ranks.run(stopped, 1, command(files, "first"), 0, "in tasks") == [
        ("received SIGTERM", 0, ["tasks"])
    ]
    (result,) = run_main(ranks, command(files, "first"))
    assert result.exit_code == 0 and records(files / "first") == whole, result.stderr


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, []),
        ({"eval_interval": 4}, [0, 4, 8, 10]),
        ({"eval_interval": 4, "exit_interval": 3}, [0, 3, 4, 6, 8, 9, 10]),
        ({"exit_interval": 3}, []),
    ],
)
def test_when_it_is_due(more, expected):
    training = TrainingConfig(train_iters=10, **more)
    assert [iteration for iteration in range(11) if is_evaluated(iteration, training)] == expected
