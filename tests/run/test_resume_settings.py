"""Check what may change on resume.

Settings of the optimizer and the batch apply from the resumed step, as the flags say.
"""

from __future__ import annotations

import pytest

from mkd.log.records import read_records
from tests.fault_injection import fault
from tests.train.test_resume import STEPS, argv, files, train_and_hash  # noqa: F401 (files is a fixture)

DISTRIBUTED = ("--use-distributed-optimizer",)


@pytest.fixture(scope="module")
def expected(files, ranks) -> list[float]:  # noqa: F811
    """Return the learning rates of a run that was not stopped."""
    ranks.run(train_and_hash, 1, argv(files, "not stopped"))
    return learning_rates(files / "not stopped")


def learning_rates(folder) -> list[float]:
    return [record["learning_rate"] for record in read_records(folder) if "split" not in record]


def settings_after_load(arguments) -> list[tuple]:
    """Return (betas, eps, weight decay) of every parameter group."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    run = build_run(plan_run(load_config(arguments).config, 1), detect())
    run.reporter.close()
    groups = run.engine.optimizer.optimizer.param_groups
    return [(tuple(group["betas"]), group["eps"], group["weight_decay"]) for group in groups]


def train_with_fault(arguments, text):
    with fault(text):
        return train_and_hash(arguments)


@pytest.mark.parametrize("more", [(), pytest.param(DISTRIBUTED, marks=pytest.mark.slow)])
def test_flags_of_the_new_start_count(more, files, expected, ranks):  # noqa: F811
    name = f"settings {len(more)}"
    ranks.run(train_and_hash, 1, argv(files, name, *more, "--exit-interval", STEPS // 2))
    changed = ("--adam-beta1", 0.5, "--adam-eps", 1e-6, "--weight-decay", 0.3, "--load", files / name)
    lower = [word if word != "0.001" else "0.0001" for word in argv(files, name, *more, *changed)]
    ((first, *_, last),) = ranks.run(settings_after_load, 1, lower)
    assert {first, last} == {((0.5, 0.999), 1e-6, 0.0), ((0.5, 0.999), 1e-6, 0.3)}
    ranks.run(train_and_hash, 1, lower)
    lowered = expected[: STEPS // 2] + [rate / 10 for rate in expected[STEPS // 2 :]]
    assert learning_rates(files / name) == pytest.approx(lowered, rel=1e-12)


@pytest.mark.parametrize("batch", [8, pytest.param(3, marks=pytest.mark.slow)])
def test_another_batch_size_does_not_bend_the_schedule(batch, files, expected, ranks):  # noqa: F811
    name = f"batch {batch}"
    ranks.run(train_and_hash, 1, argv(files, name, "--exit-interval", STEPS // 2))
    ranks.run(train_and_hash, 1, argv(files, name, "--load", files / name, "--global-batch-size", batch))
    assert learning_rates(files / name) == expected


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.slow), DISTRIBUTED])
def test_a_save_before_the_first_update(more, files, ranks):  # noqa: F811
    """The first step is skipped and saved: its optimizer has never been used."""
    skip, first_step = ("--non-finite", "skip", *more), "nan@in_step:0:1"
    straight = ranks.run(train_with_fault, 1, argv(files, f"skipped {len(more)}", *skip), first_step)
    halves = f"skipped halves {len(more)}"
    ranks.run(train_with_fault, 1, argv(files, halves, *skip, "--exit-interval", 1), first_step)
    assert ranks.run(train_and_hash, 1, argv(files, halves, *skip, "--load", files / halves)) == straight


def test_no_step_is_missing_in_the_metrics_after_a_crash(files, ranks):  # noqa: F811
    """A record covers four steps; two were done before the checkpoint, and the crash came in between."""
    every = ("--log-interval", 4, "--save-interval", 3, "--train-iters", 8, "--lr-decay-iters", 8)
    ranks.run(train_and_hash, 1, argv(files, "in one go", *every))
    crashes = argv(files, "crashed", *every)
    with pytest.raises(AssertionError, match="error@in_data:0:8"):
        ranks.run(train_with_fault, 1, crashes, "error@in_data:0:8")
    ranks.run(train_and_hash, 1, [*crashes, "--load", str(files / "crashed")])
    whole, parts = (read_records(files / run) for run in ("in one go", "crashed"))
    assert [record["iteration"] for record in parts] == [4, 8]
    of_time = {"step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share"}
    for record, expected in zip(parts, whole, strict=True):
        assert 0 < record["teacher_share"] < 1 and record.keys() == expected.keys()
        assert all(record[key] == expected[key] for key in expected.keys() - of_time)
