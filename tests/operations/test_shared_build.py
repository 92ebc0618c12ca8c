"""While rank 0 builds, the others wait as long as it makes progress; a signal to any of them ends all."""

from __future__ import annotations

import json
import signal
import time

import pytest

from mkd.errors import Preempted
from mkd.operations.shared_build import leave_preempted
from tests.operations.test_stopping import run_and_signal
from tests.reported import Reported
from tests.train.command import flags, make_files, run_main, write_records
from tests.train.processes import run_processes

LIMIT_S = 9.0  # limit of a phase without progress


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("shared_build"))


def long_text(files, megabytes: float):
    """Return a file that takes a third of a second per megabyte, and a function that tells if it is read."""
    texts = (
        f"{i}: " + "the quick brown fox jumps over the lazy dog " * 24 for i in range(int(megabytes * 950))
    )
    path = write_records(files / f"{megabytes}.jsonl", *({"text": text} for text in texts))
    return path.name, lambda: any(
        one.stat().st_size for one in files.glob(f"cache/{path.stem}-*.partial-*.loss_mask.bin")
    )


def build_together(seconds: float, signalled_rank: int | None, fails: bool) -> tuple:
    """Return (value or error, seconds since the start, seconds since the last progress)."""
    from mkd.data.build import _prepare_once
    from mkd.errors import MkdError
    from mkd.operations.phases import Phases
    from mkd.operations.shared_build import SharedBuild
    from mkd.operations.signals import Signals
    from mkd.operations.watchdog import Watchdog
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    signals = Signals(signal.SIGUSR1 if context.rank == signalled_rank else 0)
    watchdog = Watchdog.idle(context.rank, context.world_size)
    build = SharedBuild(context, signals, Phases(watchdog))
    start = time.monotonic()

    def prepare():
        while time.monotonic() - start < seconds:
            time.sleep(0.01)
            build.progress()
        if fails:
            raise OSError("no space")
        return "prefix"

    try:
        outcome = _prepare_once(prepare, context.rank == 0, build.share)
    except MkdError as error:
        outcome = type(error).__name__, error.exit_code, error.what
    now = time.monotonic()
    return outcome, now - start, now - watchdog._since


def end_if_one_is_asked(asked_rank: int) -> str:
    """Return the code of the error on this rank if rank `asked_rank` has a signal when the data are ready."""
    from mkd.operations.phases import Phases
    from mkd.operations.shared_build import SharedBuild
    from mkd.operations.signals import Signals
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    signals = Signals(signal.SIGINT if context.rank == asked_rank else 0)
    try:
        SharedBuild(context, signals, Phases()).end_if_asked()
    except Preempted as stop:
        return Reported.of(stop)
    return ""


@pytest.mark.parametrize("asked_rank, code", [(None, ""), (1, "preempted: received")])
def test_a_signal_ends_all_before_models_are_loaded(asked_rank, code, ranks):
    assert ranks.run(end_if_one_is_asked, 2, asked_rank) == [code, code]


def test_all_have_the_result(ranks):
    for outcome, seconds, idle in ranks.run(build_together, 2, 1.5, None, False):
        assert outcome == "prefix" and 1 < seconds < 5 and idle < 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault("13 data build")
def test_a_signal_to_any_rank_ends_all(rank, ranks):
    for outcome, seconds, _ in ranks.run(build_together, 2, 30, rank, False):
        assert outcome == ("Preempted", 75, "received SIGUSR1") and seconds < 2


def test_an_error_is_raised_by_all(ranks):
    for outcome, *_ in ranks.run(build_together, 2, 0.1, None, True):
        assert outcome == ("DataError", 65, "preparing the data failed: OSError: no space")


def test_the_marker_has_the_position_of_the_latest_checkpoint(tmp_path):
    """If the folder is damaged, the position is 0; the next start reports the damage."""

    def position():
        leave_preempted(str(tmp_path), Preempted("received SIGTERM", code="example"))
        return json.loads((tmp_path / "PREEMPTED").read_text())

    reason = {"reason": "received SIGTERM"}
    counts = "iteration consumed_samples consumed_tokens skipped_iterations consumed_prompts"
    assert position() == dict.fromkeys(counts.split(), 0) | reason
    (tmp_path / "iter_0000004").mkdir()
    saved = {"iteration": 4, "consumed_samples": 16, "skipped_iterations": 1}
    state = saved | {"fingerprints": {"data.seq_length": 32}}  # written before tokens were counted
    (tmp_path / "iter_0000004" / "mkd.json").write_text(json.dumps(state))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert position() == saved | {"consumed_tokens": 512, "consumed_prompts": 0} | reason
    (tmp_path / "iter_0000004" / "mkd.json").write_text("{")
    assert position()["iteration"] == 0


@pytest.mark.slow
@pytest.mark.fault("13 data build")
def test_a_signal_while_data_are_tokenised(files):
    """No stump remains, no crash is counted, and the marker of an earlier run is replaced."""
    name, is_tokenised = long_text(files, 20)
    folder, told = files / "tokenising", []
    folder.mkdir()
    (folder / "DONE").write_text("{}")

    def after():
        told.append(time.monotonic())
        return is_tokenised()

    codes, output = run_and_signal(
        files, folder.name, signal.SIGTERM, "--data-path", files / name, after=after
    )
    assert codes == [75, 75] and time.monotonic() - told[-1] < 5, output[-2000:]
    assert (
        "preempted: received SIGTERM" in output
        and "the data was being read" in output
        and "Traceback" not in output
    )
    marker = json.loads((folder / "PREEMPTED").read_text())
    assert marker["iteration"] == 0 and marker["reason"] == "received SIGTERM"
    assert not (folder / "DONE").exists() and not (folder / "RUNNING").exists()
    assert not list(files.glob("cache/*.partial-*"))


@pytest.mark.slow
def test_a_long_build_is_no_hang(files, tmp_path):
    """The build takes three times the limit of a phase."""
    name, _ = long_text(files, 3 * LIMIT_S * 3.2)
    argv = flags(files, "long", "--distributed-timeout-minutes", LIMIT_S / 60, "--data-path", files / name)
    start = time.time()
    results = run_processes(tmp_path, argv, 2)
    assert [one.code for one in results] == [0, 0], results[0].output[-2000:]
    assert results[0].at - start > 2 * LIMIT_S, "the build was too short to show anything"


def count_workers(argv: list[str]) -> tuple[int, int]:
    """Run so that any file is worth a process.

    Return (exit code, the most processes tokenising at a time).
    """
    import multiprocessing

    from mkd.data.corpus import encoding
    from mkd.operations.shared_build import SharedBuild
    from tests.train.command import call_main

    found, progress, limit = [], SharedBuild.progress, encoding.WORKER_BYTES

    def look(self):
        found.append(len(multiprocessing.active_children()))
        progress(self)

    SharedBuild.progress, encoding.WORKER_BYTES = look, 100
    try:
        return call_main(argv)[0], max(found)
    finally:
        SharedBuild.progress, encoding.WORKER_BYTES = progress, limit


@pytest.mark.slow
def test_a_run_tokenises_with_the_cores_that_it_has(files, ranks):
    """The cache equals that of one process."""
    import os

    plain, shared = (files / name for name in ("cache", "cache of several"))
    (alone,) = run_main(ranks, flags(files, "one process"))
    ((code, workers),) = ranks.run(count_workers, 1, flags(files, "processes", data_cache_path=shared.name))
    assert (alone.exit_code, code, workers) == (0, 0, min(16, len(os.sched_getaffinity(0))))
    made = sorted(shared.glob("text-*"))
    assert made and all(path.read_bytes() == (plain / path.name).read_bytes() for path in made)
