"""Check the verdict of a plan: if it fits, and changes that really make it fit."""

from __future__ import annotations

import re
import shlex

import pytest

from mkd.errors import ErrorList
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.advice.verdict import SHOWN, describe, fullest_rank, remedies, verdict
from mkd.plan.footprint.memory import GIB
from mkd.plan.forecast import Forecast
from mkd.plan.times.hardware import GATHER_BYTES_PER_MS, HOST_BYTES_PER_MS
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER, STUDENT, TEACHER, config
from tests.reported import reports
from tests.run_facts import forecast_of

PEERS = ("--teacher-residency", "peers", "--teacher-peers")


def forecast(world_size: int, *argv: str | int):
    settings = config("--student-hf", "s", "--data-path", "d", "--train-iters", 1, *argv)
    return forecast_of(settings, world_size, STUDENT, [TEACHER])


def verdict_of(world_size: int, memory_gib: float, *argv: str | int) -> list[str]:
    """Return the lines of the verdict, which the description of the plan contains."""
    pair = forecast(world_size, "--device-memory-gib", memory_gib, *argv)
    text = verdict(pair, memory_gib)
    assert f"{describe_forecast(pair)}\n{text}\n" in describe(pair)
    return text.splitlines()


def shown(lines: list[str]) -> list[tuple[list[str], float, float]]:
    """Return (flags, predicted ms, GiB) of each change."""
    found = [re.fullmatch(r"  \d\. (.*): ([\d.e+]+) ms, ([\d.]+) GiB", line).groups() for line in lines[2:]]
    return [(shlex.split(flags), float(ms), float(gib)) for flags, ms, gib in found]


def test_without_a_size_there_is_no_verdict():
    plain = forecast(8)
    assert describe(plain) == describe_forecast(plain)


def test_what_fits_says_how_much_is_needed_and_where():
    argv = ["--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto", "--global-batch-size", 16]
    rank, need = fullest_rank(forecast(4, *argv))
    (line,) = verdict_of(4, 80, *argv)
    assert (
        line.startswith(f"memory: fits; pipeline rank {rank} needs most, {need:.1f} of the 76.0 GiB")
        and rank == 0
    )


def test_five_percent_stay_free():
    _, need = fullest_rank(forecast(8))
    assert verdict_of(8, need / 0.95 + 0.01)[0].startswith("memory: fits")
    assert verdict_of(8, need / 0.95 - 0.01)[0].startswith("memory: does not fit")


@pytest.mark.parametrize(
    ("world_size", "memory_gib", "argv"),
    [
        (8, 60, []),
        (8, 28, ["--global-batch-size", 64]),
        (
            4,
            36,
            ["--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto", "--global-batch-size", 16],
        ),
        (8, 40, ["--tensor-model-parallel-size", 2, "--micro-batch-size", 4, "--kd-fp32-logits"]),
    ],
)
def test_changes_do_what_they_say(world_size, memory_gib, argv):
    """Each remedy, given as flags to the same command, fits with the memory and time that were shown."""
    lines = verdict_of(world_size, memory_gib, *argv)
    assert lines[0].startswith("memory: does not fit; pipeline rank 0 needs")
    found = shown(lines)
    assert 1 <= len(found) <= SHOWN and [ms for _, ms, _ in found] == sorted(ms for _, ms, _ in found)
    batch = forecast(world_size, *argv).batch.global_batch_size
    for flags, ms, gib in found:
        changed = forecast(world_size, *argv, *flags)
        # also if it was not given and follows from the layout
        assert changed.batch.global_batch_size == batch
        assert fullest_rank(changed)[1] == pytest.approx(gib, abs=0.051) and gib <= 0.95 * memory_gib
        assert changed.planned_step_ms() == pytest.approx(ms, rel=1e-3)


def test_no_part_of_a_change_is_idle():
    """A remedy without one of its flags does not fit."""
    found = shown(verdict_of(8, 28, "--global-batch-size", 64))
    pairs = [
        flags
        for flags, _, _ in found
        if "--tensor-model-parallel-size" in flags and "--pipeline-layout" in flags
    ]
    assert pairs
    for part in (
        ["--tensor-model-parallel-size", 2, "--sequence-parallel"],
        ["--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto"],
    ):
        assert fullest_rank(forecast(8, "--global-batch-size", 64, *part))[1] > 0.95 * 28


def test_nothing_helps_one_small_gpu():
    first, last = verdict_of(1, 10)
    assert "does not fit" in first and last.startswith("no three changes") and "more GPUs" in last


def test_host_copies_cost_time():
    plain, optimizer, teacher = (
        forecast(1, *more)
        for more in ([], ["--optimizer-residency", "host"], ["--teacher-residency", "host"])
    )
    state_ms = 2 * plain.memory.ranks[0].optimizer_gib * GIB / HOST_BYTES_PER_MS
    assert optimizer.step_ms() == pytest.approx(plain.step_ms() + state_ms)
    assert plain.step_ms() == plain.step.step_ms + plain.optimizer_ms
    assert teacher.step_ms() > plain.step_ms()  # 8,192 tokens do not hide the copy of a layer
    whole_ms = optimizer.planned_step_ms()
    assert whole_ms == pytest.approx(plain.planned_step_ms() + state_ms) == optimizer.step_ms()
    assert f"from and to the host: {whole_ms:.4g} ms" in describe_forecast(optimizer)
    assert describe_forecast(optimizer).count(f"predicted MFU {optimizer.mfu(whole_ms):.3f}") == 1
    text = describe_forecast(teacher)
    assert f"predicted step: {teacher.step.step_ms:.4g} ms" in text and "to the host" not in text


def test_layers_from_peers_cost_time_only_where_computation_is_shorter():
    """Each forward of a layer then takes as long as its all-gather."""
    peers, layers = (*PEERS, 8), TEACHER.num_layers
    for length, is_hidden in ((8192, True), (256, False)):
        plain, split = (forecast(8, "--seq-length", length, *more) for more in ((), peers))
        late_ms = split.stage_times[0].forward_ms - plain.stage_times[0].forward_ms
        gather_ms = 2 * 192e6 * 7 / 8 / GATHER_BYTES_PER_MS  # a layer has 192 million weights
        assert late_ms == 0 if is_hidden else 0 < late_ms < gather_ms * layers
        assert is_hidden or gather_ms * layers - late_ms < plain.stage_times[0].forward_ms


def test_peers_are_a_change_where_there_are_replicas():
    """The fewest peers that fit are shown, with the time of a whole teacher, which a plan expects."""
    found = shown(verdict_of(8, 52, "--use-distributed-optimizer"))
    assert found[0][0][:4] == ["--teacher-residency", "peers", "--teacher-peers", "4"]
    assert found[0][1] == pytest.approx(
        forecast(8, "--use-distributed-optimizer").planned_step_ms(), rel=1e-3
    )
    one = remedies(forecast(1, "--use-distributed-optimizer"), 42)
    assert one and not any("peers" in remedy.describe() for remedy in one)


def test_no_change_puts_peers_on_several_machines():
    """On 16 GPUs, 8 peers beside TP 2 would span both machines."""
    pair = forecast(16, "--tensor-model-parallel-size", 2, "--use-distributed-optimizer")
    split = forecast(16, *PEERS, 8, "--tensor-model-parallel-size", 2, "--use-distributed-optimizer")
    need = fullest_rank(split)[1]
    assert not any("peers" in remedy.describe() for remedy in remedies(pair, need))
    split = forecast(16, *PEERS, 4, "--tensor-model-parallel-size", 2, "--use-distributed-optimizer")
    (first, *_) = remedies(pair, fullest_rank(split)[1])
    assert first.describe().startswith("--teacher-residency peers --teacher-peers 4:")


def test_a_configuration_that_cannot_run_has_no_forecast():
    with pytest.raises(ErrorList) as caught:
        forecast(3, "--tensor-model-parallel-size", 2)
    assert reports(caught.value) == ["world-not-divisible: cannot be divided into replicas"]


@pytest.mark.parametrize(
    ("student", "flag"),
    [(MOE_STUDENT, "--expert-model-parallel-size"), (STUDENT, "--teacher-expert-model-parallel-size")],
)
def test_experts_over_more_processes_help(student, flag):
    """235 billion parameters of a teacher on 4 stages take 57 GiB a GPU at EP 2."""
    base = ["--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--use-distributed-optimizer"]
    base += ["--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto", "--seq-length", 4096]

    def needs(size: int) -> tuple[Forecast, float]:
        settings = config(*base, "--global-batch-size", 64, flag, size)
        pair = forecast_of(settings, 64, student, [MOE_TEACHER])
        return pair, fullest_rank(pair)[1]

    (pair, before), (_, after) = needs(2), needs(4)
    found = {one.changes[0].text: one.need_gib for one in remedies(pair, 0.95 * before)}
    assert found[f"{flag} 4"] == after < 0.95 * before


def test_teachers_that_stay_behind_are_a_remedy_unless_auto_has_decided():
    """After an out-of-memory error the memory is not in the settings, and `auto` may have been too large."""
    argv = ["--pipeline-model-parallel-size", 4, "--global-batch-size", 16]
    _, need = fullest_rank(forecast(4, *argv))
    found = [one.describe().split(":")[0] for one in remedies(forecast(4, *argv), need - 0.1)]
    assert "--teacher-prefetch 0" in found
    ahead = forecast(4, *argv, "--device-memory-gib", 200)
    again = [one.describe().split(":")[0] for one in remedies(ahead, need - 0.1)]
    assert ahead.states_ahead == 8 and "--teacher-prefetch 0" in again
    known = forecast(4, *argv, "--device-memory-gib", (need - 0.1) / 0.95)
    (_, less) = fullest_rank(known)
    assert known.states_ahead == 0 and less <= need - 0.1
    assert not any("--teacher-prefetch" in one.describe() for one in remedies(known, less - 0.1))


def test_remedies_are_compared_as_runs(monkeypatch):
    """The first ones are those of a comparison of all, although not all are planned."""
    pair = forecast(8, "--global-batch-size", 64, "--device-memory-gib", 28)
    found = remedies(pair, 26.6)
    first = [one.step_ms for one in found[:SHOWN]]
    assert first == sorted(one.step_ms for one in found)[:SHOWN]
    assert first[0] < 0.97 * found[0].forecast.step_ms(), "its teachers are ahead"
    assert all(one.least_ms < one.step_ms + 1e-3 for one in found)
    assert f"by predicted step time (as it is: {pair.planned_step_ms():.4g} ms):" in verdict(pair, 28)
    monkeypatch.setattr("mkd.plan.advice.verdict.QUICKLY_COMPARED", 0)
    behind = remedies(pair, 26.6)
    assert [one.step_ms for one in behind] == sorted(one.forecast.step_ms() for one in behind)
    assert "by predicted step time without teachers ahead (as it is: 3200 ms)" in verdict(pair, 28)
