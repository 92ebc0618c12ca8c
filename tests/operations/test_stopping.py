"""Runs end early because of a signal to any rank, their own time limit, or the end of a Slurm job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fault_injection import environment as faulty
from tests.train.command import flags, make_files, read_metrics, run_main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("stopping"))


def run_and_signal(
    files,
    run: str,
    number: int,
    *more,
    processes: int = 2,
    after="iteration        2/",
    to_group=False,
    until_gone=False,
    fault="",
    again_after="",
):
    """Signal a long run once it has printed `after`; return (exit codes or -signals, output of rank 0).

    Return (exit code or -signal of each process, output of rank 0). The signal goes to the last rank alone,
    or to all processes and their data workers; it is sent once, repeatedly, or again after more output.
    """
    argv = flags(files, run, "--train-iters", 4000, "--save", files / run, "--load", files / run, *more)
    argv += ["--log-format", "megatron", *(["--num-workers", "1"] if to_group else [])]
    port = str(29500 + os.getpid() % 1000)
    world = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank in range(processes):
        environment = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= faulty(fault)
        command = [sys.executable, str(ROOT / "pretrain_kd.py"), *argv]
        output = (files / f"{run}-{rank}.out").open("w")
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
    for moment in (after, again_after) if again_after else (after,):
        deadline = time.monotonic() + 120
        while not (moment() if callable(moment) else moment in (files / f"{run}-0.out").read_text()):
            assert time.monotonic() < deadline and all(process.poll() is None for process in started), (
                "it never got there"
            )
            time.sleep(0.05)
        time.sleep(0.5 if fault else 0)  # until they meet it
        for process in started if to_group else started[-1:]:
            os.killpg(process.pid, number) if to_group else process.send_signal(number)
    while until_gone and started[-1].poll() is None:
        started[-1].send_signal(number)
        time.sleep(0.001)
    codes = [process.wait(timeout=60) for process in started]
    return codes, (files / f"{run}-0.out").read_text()


@pytest.mark.parametrize(
    ("number", "to_group", "after"),
    [
        pytest.param(signal.SIGTERM, False, "iteration        2/", marks=pytest.mark.fault(13)),
        pytest.param(
            signal.SIGUSR1, True, "iteration        1/", marks=[pytest.mark.fault(13, 14), pytest.mark.slow]
        ),
        pytest.param(  # or while data are built
            signal.SIGINT, False, "CPU platform", marks=[pytest.mark.fault("13 first step"), pytest.mark.slow]
        ),
    ],
    ids=["SIGTERM to one rank", "SIGUSR1 to all and their workers", "SIGINT before the first step"],
)
def test_a_signal_saves_and_asks_to_be_started_again(files, number, to_group, after):
    run = f"{signal.Signals(number).name}"
    codes, output = run_and_signal(files, run, number, to_group=to_group, after=after)
    assert codes == [75, 75], output[-2000:]
    marker = json.loads((files / run / "PREEMPTED").read_text())
    assert marker["reason"] == f"received {signal.Signals(number).name}"
    label = "interrupted" if number == signal.SIGINT else "preempted"
    assert f"{label}: received {signal.Signals(number).name}" in output and "Traceback" not in output
    assert "stopped at iteration" not in output, "said twice"
    pointer = files / run / "latest_checkpointed_iteration.txt"
    if after == "CPU platform":
        assert marker["iteration"] == 0 and not pointer.exists()
    else:
        assert (
            int(pointer.read_text()) == marker["iteration"] == read_metrics(files / run)[-1]["iteration"] > 0
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
@pytest.mark.fault(13)
def test_signals_that_go_on_until_the_process_is_gone(files, number):
    """The exit code is decided before the interpreter shuts down, and no signal changes it."""
    run = f"{number.name} until gone"
    codes, output = run_and_signal(files, run, number, processes=1, until_gone=True)
    assert codes == [75] and "preempted: received" in output, output[-2000:]


@pytest.mark.fault("13 evaluation")
def test_a_signal_ends_an_evaluation(files):
    more = ("--valid-data-path", files / "text.jsonl", "--eval-interval", 1, "--eval-iters", 3000)
    lines = [json.loads(line) for line in (files / "text.jsonl").read_text().splitlines()] * 200
    (files / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    more = ("--valid-data-path", files / "long.jsonl", *more[2:])
    start = time.monotonic()
    codes, output = run_and_signal(
        files, "evaluating", signal.SIGTERM, *more, processes=1, after="CPU platform"
    )
    assert codes == [75] and "validation loss" not in output, output[-2000:]
    assert time.monotonic() - start < 60


@pytest.mark.fault(13)
def test_the_next_start_goes_on_and_is_done(files, ranks):
    codes, _ = run_and_signal(files, "again", signal.SIGTERM, processes=1)
    stopped = json.loads((files / "again" / "PREEMPTED").read_text())["iteration"]
    more = ("--train-iters", stopped + 2, "--save", files / "again", "--load", files / "again")
    (result,) = run_main(ranks, flags(files, "again", *more))
    assert codes == [75] and result.exit_code == 0, result.stderr
    assert [line["iteration"] for line in read_metrics(files / "again")] == list(range(1, stopped + 3))
    assert json.loads((files / "again" / "DONE").read_text())["iteration"] == stopped + 2
    assert not (files / "again" / "PREEMPTED").exists()


def answers(end_in_s: float, minutes: float | None, received: int):
    """Return the answer to both ranks if rank 1 alone knows the end or has received a signal."""
    from mkd.operations.signals import Signals
    from mkd.operations.stopping import Stopper
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    knows = context.rank == 1
    environment = {"SLURM_JOB_END_TIME": str(int(time.time() + end_in_s))} if knows else {}
    stopper = Stopper(context, Signals(received if knows else 0), minutes if knows else None, environment)
    stopper.took(step_s=4.0)
    stopper.took(step_s=1.0, save_s=6.0)
    stop = stopper.agreed()
    return stop and (stop.reason, stop.is_preempted)


@pytest.mark.parametrize(
    ("end_in_s", "minutes", "received", "expected"),
    [
        (1000, None, 0, None),
        # 1.5 x (4 s step + 6 s save) no longer fit
        (13, None, 0, ("the Slurm job is about to end (SLURM_JOB_END_TIME)", True)),
        (-3600, None, 0, None),  # left from another job, or the limit was extended
        (1000, 0.2, 0, ("the time of --exit-duration-in-mins is over", False)),
        (1000, 1.0, 0, None),
        (13, 0.2, signal.SIGTERM, ("received SIGTERM", True)),
    ],
)
def test_what_one_rank_knows_all_are_told(end_in_s, minutes, received, expected, ranks):
    results = ranks.run(answers, 2, end_in_s, minutes, int(received))
    assert results == [expected, expected]


def saves_by_time(minutes: float, save_s: float, is_given: bool):
    """Return whether rank 1 alone makes both save: before the interval, after it, and after the save."""
    from mkd.operations.signals import Signals
    from mkd.operations.stopping import Stopper
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    stopper = Stopper(context, Signals(), environment={})
    stopper.save_interval_in_mins = minutes if context.rank == 1 else 0
    stopper.slow_saves_are_rare = not is_given
    stopper.took(save_s=save_s)
    found = []
    for pause_s in (0.0, 1.1):
        time.sleep(pause_s)
        stopper.exchange(True)
        found.append(bool(stopper.save_is_due))
    stopper.saved()
    stopper.exchange(True)
    return [*found, bool(stopper.save_is_due)]


@pytest.mark.parametrize(
    ("minutes", "save_s", "is_given", "expected"),
    [
        (1 / 60, 0.0, False, [False, True, False]),
        (1 / 60, 0.1, False, [False, False, False]),  # a save of 0.1 s is 3 % of 3.3 s
        (1 / 60, 0.1, True, [False, True, False]),
        (0.0, 0.0, False, [False, False, False]),
    ],
)
def test_all_ranks_save_by_the_clock_of_one(minutes, save_s, is_given, expected, ranks):
    assert ranks.run(saves_by_time, 2, minutes, save_s, is_given) == [expected, expected]


def test_an_end_of_the_job_that_has_passed_is_named():
    from mkd.operations.signals import Signals
    from mkd.operations.stopping import Stopper

    def note(end):
        return Stopper(None, Signals(), environment={"SLURM_JOB_END_TIME": end}).note

    assert note(str(int(time.time()) + 60)) is note("") is None
    assert "SLURM_JOB_END_TIME is ignored: it passed 1h00m before" in note(str(int(time.time()) - 3600))


def agreements(finite: list[bool], received: int):
    """Return what this rank is told if each rank knows if it is finite, and rank 1 has a signal."""
    from mkd.operations.phases import FORWARD_BACKWARD, OPTIMIZER, ROLLOUT, Phases
    from mkd.operations.signals import Signals
    from mkd.operations.stopping import Stopper
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    stopper = Stopper(context, Signals(received if context.rank == 1 else 0))
    phases = Phases(stopper)
    for _ in range(2):
        phases.enter(ROLLOUT, 1)
        time.sleep(0.05)
    with phases(FORWARD_BACKWARD, 1):
        time.sleep(0.05)
    with phases(OPTIMIZER, 1):
        agreed = stopper.exchange(finite[context.rank])
    step_s = stopper.step_s
    time.sleep(0.1)
    stopper.agreed()  # between steps the clock of a step stands still
    is_still = stopper.step_s == step_s
    with phases(FORWARD_BACKWARD, 1):  # one more update of the iteration
        pass
    with phases(OPTIMIZER, 1):
        stopper.exchange(True)
    whole = stopper.step_s >= step_s + 0.1
    with phases(FORWARD_BACKWARD, 2):
        stopper.exchange(True)
    longest = stopper.step_s < step_s + 5
    return agreed.finite, agreed.stop and agreed.stop.reason, step_s >= 0.15, is_still, whole and longest


@pytest.mark.parametrize("finite", [[True, True], [True, False], [False, True]])
@pytest.mark.parametrize("received", [0, signal.SIGTERM])
def test_all_ranks_agree_on_a_step(finite, received, ranks):
    """One exchange tells every rank whether the update is applied and whether the run ends.

    Phases time the step, with all its updates.
    """
    answer = (all(finite), "received SIGTERM" if received else None, True, True, True)
    assert ranks.run(agreements, 2, finite, int(received)) == [answer, answer]


def ends_before_a_first_save(num_bytes, save_s):
    """Return whether a job that ends in 60 s stops (before its first step, after a step of 2 s)."""
    from mkd.operations.signals import Signals
    from mkd.operations.stopping import Stopper
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    environment = {"SLURM_JOB_END_TIME": str(int(time.time() + 60))}
    stopper = Stopper(
        ParallelContext.create(detect()), Signals(), environment=environment, first_save_bytes=num_bytes
    )
    before = stopper.agreed()
    stopper.took(step_s=2.0, save_s=save_s)
    return before is not None, stopper.agreed() is not None


@pytest.mark.parametrize(
    ("num_bytes", "save_s", "expected"),
    [
        (0, 0.0, (False, False)),  # no --save
        # a Qwen3-1.7B with its optimizer, 96 s at 250 MB/s; but every start does a step
        (24e9, 0.0, (False, True)),
        (5e9, 0.0, (False, False)),
        (24e9, 5.0, (False, False)),  # one save was timed
    ],
)
def test_the_first_save_of_a_start_needs_time_too(num_bytes, save_s, expected, ranks):
    assert ranks.run(ends_before_a_first_save, 1, num_bytes, save_s) == [expected]


@pytest.mark.fault("13 twice")
def test_the_second_ctrl_c_ends_all_ranks_without_a_traceback(files, ranks):
    """Both ranks hang in step 3, after two saves. Started again, the run is done."""
    run, answer = (
        "twice",
        "stopping after step 3, then saving; press Ctrl-C again to stop now and lose 1 step\n",
    )
    # the signal of the first line comes while step 3 begins
    hang = dict(after="iter_0000002", fault="hang@in_step::3", again_after="again to stop now")
    codes, output = run_and_signal(files, run, signal.SIGINT, "--save-interval", 1, to_group=True, **hang)
    assert codes == [130, 130] and "Traceback" not in output and "lost contact" not in output, output[-3000:]
    assert answer in output
    assert f"stopping now; {files / run / 'iter_0000002'} is saved: --load {files / run} resumes" in output
    assert not (files / run / "RUNNING").exists() and not (files / run / "PREEMPTED").exists()
    argv = flags(files, run, "--train-iters", 4, "--save", files / run, "--load", files / run)
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0 and "resumed from iteration 2" in result.stdout, result.stderr
    assert [line["iteration"] for line in read_metrics(files / run)] == [1, 2, 3, 4]
