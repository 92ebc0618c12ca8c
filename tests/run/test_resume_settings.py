"""Check what may change on resume.

Settings of the optimizer and the batch apply from the resumed step, as the flags say.
"""

from __future__ import annotations

import hashlib

import pytest

from mkd.log.records import read_records
from tests.fault_injection import fault
from tests.tiny_models import add_tokenizer, make_model
from tests.train.test_resume import STEPS, argv, files, train_and_hash  # noqa: F401 (files is a fixture)

DISTRIBUTED = ("--use-distributed-optimizer",)


@pytest.fixture(scope="module")
def expected(files, ranks) -> list[float]:  # noqa: F811
    """Return the learning rates of a run that was not stopped."""
    ranks.run(train_and_hash, 1, argv(files, "not stopped"))
    return learning_rates(files / "not stopped")


def learning_rates(folder) -> list[float]:
    return [record["learning_rate"] for record in read_records(folder) if "split" not in record]


def optimizer_after_load(arguments):
    """Return Megatron's optimizer of a run that has just started on this world."""
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    run = build_run(plan_run(load_config(arguments).config, dist.get_world_size()), detect())
    run.reporter.close()
    return run.engine.optimizer.optimizer


def settings_after_load(arguments) -> list[tuple]:
    """Return (betas, eps, weight decay) of every parameter group."""
    groups = optimizer_after_load(arguments).param_groups
    return [(tuple(group["betas"]), group["eps"], group["weight_decay"]) for group in groups]


def state_after_load(arguments) -> tuple[int, str, set[float], set[float]]:
    """Return the number of optimizers, SHA-256 of all moments, the steps, and the peak learning rates."""
    inner = optimizer_after_load(arguments).chained_optimizers
    states = [state for one in inner for state in one.optimizer.state.values()]
    digest = hashlib.sha256()
    for state in states:
        digest.update(state["exp_avg"].numpy().tobytes() + state["exp_avg_sq"].numpy().tobytes())
    rates = {group["max_lr"] for one in inner for group in one.param_groups}
    return len(inner), digest.hexdigest(), {float(state["step"]) for state in states}, rates


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


@pytest.mark.parametrize("more", [(), DISTRIBUTED])
def test_optimizers_of_experts_take_another_learning_rate(more, files, ranks):  # noqa: F811
    """Experts over several processes have an optimizer of their own; what it has learned stays."""
    experts = add_tokenizer(make_model(files / f"experts {len(more)}", "qwen3_moe", seed=3))
    name = f"rate of experts {len(more)}"
    layout = ("--student-hf", experts, "--expert-model-parallel-size", 2, *more)
    ranks.run(train_and_hash, 2, argv(files, name, *layout, "--exit-interval", STEPS // 2))
    again = argv(files, name, *layout, "--load", files / name)
    kept = ranks.run(state_after_load, 2, again)
    lowered = ranks.run(state_after_load, 2, [*again, "--lr", "0.0001", "--min-lr", "0.00001"])
    assert [one[:3] for one in kept] == [one[:3] for one in lowered]
    assert all(one[0] == 2 and one[2:] == ({STEPS // 2}, {1e-3}) for one in kept)
    assert all(one[3] == {1e-4} for one in lowered)


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
