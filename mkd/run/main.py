"""The training command: configuration in, trained student out, exit code to the caller."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mkd.config.load import LoadedConfig, load_config, save_config
from mkd.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    ErrorList,
    Preempted,
    UsageError,
    discard_closed_stdout,
)
from mkd.operations.console import LOG, console
from mkd.operations.failures import FailureReports, end_of_rank
from mkd.operations.launch.rendezvous import Rendezvous
from mkd.operations.run_folders import LOG_FILES, changes_to_resume, log_folder, with_save_folder
from mkd.operations.signals import Signals, caught_signals, ignore_signals
from mkd.plan.sides import Side, side_of_teacher, sides_of
from mkd.run.chosen_place import with_place
from mkd.run.early_checks import early_problems
from mkd.run.start_text import dry_run_text, start_text

if TYPE_CHECKING:  # they load torch
    from mkd.operations.watchdog import Watchdog
    from mkd.platform import Platform
    from mkd.resolve.run_plan import Plan

INDENT = " "  # before each logged line, as before Megatron's progress lines


def main(argv: list[str], signals_afterwards: signal.Handlers | None = None) -> int:
    """Run `mkd train argv` and return the exit code. See `caught_signals` for `signals_afterwards`.

    Rank 0 prints user errors that all ranks share. The lowest rank prints an error of some ranks, with its
    number. When one failure brings down other ranks, the rank that failed first prints the traceback; the
    rest print one line.
    """
    reports = FailureReports(rank=int(os.environ.get("RANK", "0")), world_size=_world_size())
    try:
        return _main(argv, signals_afterwards, reports)
    finally:
        reports.close()


def _main(argv: list[str], signals_afterwards: signal.Handlers | None, reports: FailureReports) -> int:
    rendezvous, signals = Rendezvous(reports.rank, reports.world_size), None
    try:
        loaded = load_config(argv)
        handler = loaded.config.training.exit_signal_handler
        catching = caught_signals(signals_afterwards) if handler else nullcontext()
        with console(reports.rank, INDENT), catching as signals:
            return run(loaded, signals, reports, rendezvous)
    except Preempted as stop:
        if reports.rank == 0:
            print(f"{stop.label}: {stop}", file=sys.stderr, flush=True)
        reports.post_stop(stop)
        return stop.exit_code
    except KeyboardInterrupt:  # the second Ctrl-C, which the signals have acknowledged, or an uncaught one
        if signals is None and reports.rank == 0:
            print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if signals is not None and signals.is_forced:  # the other ranks have ended
            return EXIT_INTERRUPTED
        return end_of_rank(error, reports, rendezvous)


def run(
    loaded: LoadedConfig, signals: Signals | None, reports: FailureReports, rendezvous: Rendezvous
) -> int:
    """Plan, show, build, train, export. Refuse whatever can be refused before there is a process group.

    Return the exit code. Processes of a teacher's own answer the student's instead.
    """
    loaded = replace(loaded, config=with_save_folder(loaded.config))
    loaded = with_place(loaded, rendezvous, 60 * loaded.config.parallel.distributed_timeout_minutes)
    sides = sides_of(loaded.config, _world_size())
    side = next(one for one in reversed(sides) if one.first <= reports.rank)
    reports.speaker, reports.has_sides = side.first, len(sides) > 1
    problems = early_problems(loaded.config, sides[0].size)
    if problems:
        raise ErrorList(problems)
    from mkd.platform import detect, make_deterministic

    if loaded.config.training.deterministic_mode:
        make_deterministic()
    platform = detect()  # before Megatron is imported, because it silences its warnings
    from mkd.data.workers import worker_deaths_explained
    from mkd.operations.out_of_memory import memory_explained
    from mkd.operations.watchdog import MARGIN_S, Watchdog
    from mkd.run.plan_run import plan_run
    from mkd.run.student_side import heartbeat_of

    plan = plan_run(loaded.config, sides[0].size)
    parallel, folder = loaded.config.parallel, log_folder(loaded.config)
    if _is_rank_0():
        is_dry = loaded.config.dry_run
        show(dry_run_text(loaded, plan, platform) if is_dry else start_text(loaded, plan, platform, folder))
    # Wait longer than the watchdog, whose report says more.
    patience_s = 60 * parallel.distributed_timeout_minutes + MARGIN_S
    if loaded.config.dry_run:
        rendezvous.ready(patience_s)
        return EXIT_DONE
    if _is_rank_0():
        log, checkpoint, lora = loaded.config.log, loaded.config.checkpoint, loaded.config.lora
        make_folders(log.tensorboard_dir, checkpoint.save, checkpoint.export_hf, lora.export_lora)
        make_folders(folder, files=LOG_FILES)
    reports.folder = folder / "errors"
    watchdog = Watchdog.from_config(parallel, reports)
    watchdog.side_size = side.size
    watchdog.start()
    if signals is not None:
        signals.when_forced += [watchdog.stop, reports.post_interrupt]
    try:
        rendezvous.ready(patience_s)
        if len(sides) > 1:
            watchdog.listen(heartbeat_of(loaded.config, side, reports, signals))
        if side.teacher is not None:
            return serve(plan, side, platform, watchdog)
        explained = memory_explained(plan.forecast, reports.rank, sides[0].size)
        with explained, worker_deaths_explained():
            carry_out(loaded, plan, platform, signals, watchdog, folder, has_sides=len(sides) > 1)
    finally:
        # After an error in a run with sides, it still finds out which process of another side is gone.
        if len(sides) == 1 or not isinstance(sys.exc_info()[1], Exception):
            watchdog.stop()
    return EXIT_DONE


def serve(plan: Plan, side: Side, platform: Platform, watchdog: Watchdog) -> int:
    """Run a teacher that has processes of its own until the student ends; return the student's exit code."""
    from mkd.run.one_model import plan_model
    from mkd.run.serve_teacher import serve_teacher
    from mkd.run.student_side import meet_launch

    assert side.teacher is not None, "it is a teacher's side"
    alone = plan_model([], side_of_teacher(plan.config, side.teacher), side.size, side.teacher, side.first)
    assert alone is not None, "`plan_run` reports its problems"
    launch = meet_launch(plan.config, watchdog.reports.rank, watchdog.reports.world_size)
    return serve_teacher(plan, alone, side, launch, platform, watchdog)


def carry_out(
    loaded: LoadedConfig, plan, platform, signals: Signals | None, watchdog, folder: Path, has_sides: bool
) -> None:
    """Build, train, export. `has_sides`: teachers have processes of their own."""
    from mkd.operations.cleanup import Cleanup
    from mkd.operations.event_log import STOP, EventLog
    from mkd.operations.run_folders import remove_markers, write_job
    from mkd.run.end_text import end_text
    from mkd.run.exports import export_adapters, export_student
    from mkd.run.loop import train
    from mkd.run.setup import build_run
    from mkd.run.student_side import meet_launch

    reports = watchdog.reports
    launch = meet_launch(plan.config, reports.rank, reports.world_size) if has_sides else None
    checkpoint, started = loaded.config.checkpoint, time.monotonic()
    with Cleanup() as cleanup:
        events = EventLog() if _is_rank_0() else None
        if events:
            cleanup.add(events.end)
        current = build_run(plan, platform, signals, watchdog, cleanup, launch)
        # Not earlier: the folder may belong to another run, as `logs_of_another_run` sees in its settings.
        if events:
            with folder_errors(folder):
                events.open(folder, current.position.iteration, appends=bool(checkpoint.load))
                write_plan(loaded, plan, platform, folder)
            current.phase.follow(events)
            if checkpoint.save:
                remove_markers(Path(checkpoint.save))
                write_job(Path(checkpoint.save))
        asked, done = loaded.config.training.train_iters, current.position.iteration
        if done > asked:
            LOG.warning(
                "%d iterations are done, and --train-iters asks for %d: nothing is left to train", done, asked
            )
        stop = train(current)
        if events and stop is not None and not stop.is_preempted:  # `end_text` prints it
            events.add(STOP, f"stopped at iteration {current.position.iteration}: {stop.reason}")
        ended = not (stop and stop.is_preempted)
        if ended and checkpoint.export_hf:
            export_student(current, Path(checkpoint.export_hf), folder)
        if ended and loaded.config.lora.export_lora:
            export_adapters(current, Path(loaded.config.lora.export_lora))
        end(current, stop)
        if events:
            show(end_text(current, folder, time.monotonic() - started, stop))
    current.engine.context.leave()
    # The others need not wait for the network.
    if ended and checkpoint.export_hf and checkpoint.push_to_hub and _is_rank_0():
        push(Path(checkpoint.export_hf), checkpoint.push_to_hub)


def push(folder: Path, name: str) -> None:
    """Upload the export to the hub."""
    from mkd.release.hub_push import HubRepository

    show(f"uploading {folder} to {name}")
    show(f"uploaded to {HubRepository(name).push(folder)}")


def write_plan(loaded: LoadedConfig, plan: Plan, platform: Platform, folder: Path) -> None:
    """Write what the run is about to do: its settings, its objective and its forecast."""
    from mkd.operations.run_folders import SAVED_CONFIG
    from mkd.release.training_record import start_of_run
    from mkd.run.plan_text import figures, objective

    save_config(loaded, folder / SAVED_CONFIG)
    (folder / "loss_card.txt").write_text(objective(plan) + "\n", encoding="utf-8")
    models = [loaded.config.student.hf, *(one.hf for one in loaded.config.teachers)]
    start = start_of_run(loaded.words, _world_size(), [*filter(None, models)])
    found = figures(plan) | {"device": platform.describe()} | start
    (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def end(current, stop) -> None:
    """Write a marker of how the run ended. Raise Preempted if it should be started again."""
    from mkd.operations.run_folders import DONE, PREEMPTED, write_marker

    save, position = current.config.checkpoint.save, current.position
    is_preempted = stop is not None and stop.is_preempted
    is_done = position.iteration >= current.config.training.train_iters and not current.progress.due
    if save and _is_rank_0() and (is_preempted or is_done):
        write_marker(Path(save), PREEMPTED if is_preempted else DONE, position, stop.reason if stop else "")
    if is_preempted:
        raise Preempted(stop.reason, *what_is_kept(current), code="preempted")


def what_is_kept(current) -> tuple[str, str]:
    """Return (what remains of a run that was told to end, how to resume it)."""
    checkpoint, progress = current.config.checkpoint, current.progress
    iteration, again = current.position.iteration, "start the same command again"
    if iteration > progress.kept_iteration:
        return "with --no-save the steps of this run are lost", f"{again}, without --no-save"
    if progress.kept_in is None:
        return "no step was done: there is nothing to save", again
    changes = " and ".join(changes_to_resume(checkpoint, progress.kept_in))
    again += f", {changes}" if changes else ""
    return f"iteration {iteration} is saved in {progress.kept_in}", again


def leave(exit_code: int) -> NoReturn:
    """End the process with `exit_code`, even if schedulers keep sending signals.

    The interpreter's own shutdown is skipped, because library threads that still run may abort it. After a
    failure this waits for nothing, because other ranks may be gone.
    """
    ignore_signals()
    if exit_code in (EXIT_DONE, EXIT_PREEMPTED):
        atexit._run_exitfuncs()  # the cleanup of libraries
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def make_folders(*folders: str | Path | None, files: Sequence[str] = ()) -> None:
    """Create the folders that the run writes to, and try to write there, also to `files` that exist.

    A wrong path, a full disk or a file in the way then ends the run now, not after its last step.
    """
    for folder in [Path(one) for one in folders if one]:
        with folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as trial:
                trial.write(b"x")
                trial.flush()
            for name in files:
                if os.path.lexists(path := folder / name):
                    path.open("ab").close()


@contextmanager
def folder_errors(folder: str | Path) -> Iterator[None]:
    """Turn an OSError in the block into a UsageError about `folder`."""
    try:
        yield
    except OSError as error:
        what = f"cannot write to {folder}: {error}"
        do = "make room or choose another folder, if nothing there is in the way"
        raise UsageError(what, "the run writes there", do, code="not-writable") from error


def show(*texts: str) -> None:
    """Print texts on stdout. A closed pipe, as of `| head`, does not end the run."""
    try:
        print(*texts, sep="\n", flush=True)
    except BrokenPipeError:
        if not discard_closed_stdout():
            raise


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
