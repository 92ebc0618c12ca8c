"""The training command: configuration in, trained student out, exit code to the caller."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from mkd.config.load import LoadedConfig, format_config, load_config, save_config
from mkd.errors import EXIT_DONE, EXIT_PREEMPTED, Preempted, UsageError
from mkd.operations.failures import FailureReports, end_of_rank
from mkd.operations.meeting import Meeting
from mkd.operations.signals import Signals, caught_signals, ignore_signals


def main(argv: list[str], signals_afterwards: signal.Handlers | None = None) -> int:
    """Run `pretrain_kd.py argv`; returns the exit code. Signals that it has caught are then handled as `caught_signals` says.

    User errors are printed once, on rank 0; one that other ranks have met alone, by the first of them with its number. Of a
    failure that takes other ranks with it, its first rank has the traceback, and the others a line.
    """
    reports = FailureReports(rank=int(os.environ.get("RANK", "0")), world_size=_world_size())
    meeting = Meeting(reports.rank, reports.world_size)
    try:
        loaded = load_config(argv)
        handler = loaded.config.training.exit_signal_handler
        with caught_signals(signals_afterwards) if handler else nullcontext() as signals:
            run(loaded, signals, reports, meeting)
    except Preempted as stop:
        if reports.rank == 0:
            print(f"preempted: {stop}", file=sys.stderr, flush=True)
        return stop.exit_code
    except Exception as error:
        return end_of_rank(error, reports, meeting)
    return EXIT_DONE


def run(loaded: LoadedConfig, signals: Signals | None, reports: FailureReports, meeting: Meeting) -> None:
    """Plan, show, build, train, export. What can be refused is refused before there is a process group."""
    from mkd.platform import detect, make_deterministic

    if loaded.config.training.deterministic_mode:
        make_deterministic()
    platform = detect()  # before Megatron is imported, whose remarks it quiets
    from mkd.operations.folders import log_folder
    from mkd.operations.watchdog import MARGIN_S, Watchdog
    from mkd.run.out_of_memory import memory_explained
    from mkd.run.run_plan import plan_run

    plan = plan_run(loaded.config, _world_size())
    if _is_rank_0():
        print(
            format_config(loaded),
            plan.describe(),
            plan.loss_card(),
            platform.describe(),
            sep="\n",
            flush=True,
        )
    parallel, folder = loaded.config.parallel, log_folder(loaded.config)
    patience_s = (
        60 * parallel.distributed_timeout_minutes + MARGIN_S
    )  # the watchdog, which says more, comes first
    if loaded.config.dry_run:
        meeting.ready(patience_s)
        return
    if _is_rank_0():
        log, checkpoint = loaded.config.log, loaded.config.checkpoint
        make_folders(folder, log.tensorboard_dir, checkpoint.save, checkpoint.export_hf)
    reports.folder = folder / "errors"
    watchdog = Watchdog.of(parallel, reports)
    watchdog.start()
    try:
        meeting.ready(patience_s)
        with memory_explained(plan, reports.rank, reports.world_size):
            carry_out(loaded, plan, platform, signals, watchdog, folder)
    finally:
        watchdog.stop()


def carry_out(loaded: LoadedConfig, plan, platform, signals: Signals | None, watchdog, folder: Path) -> None:
    """Build, train, export."""
    from mkd.operations.ending import Ending
    from mkd.operations.markers import remove_markers
    from mkd.run.loop import train
    from mkd.run.setup import build_run

    checkpoint = loaded.config.checkpoint
    with Ending() as ending:
        current = build_run(plan, platform, signals, watchdog, ending)
        if _is_rank_0():  # not before: the folder may be that of another run
            save_config(loaded, folder / "config.yaml")
            (folder / "loss_card.txt").write_text(plan.loss_card() + "\n", encoding="utf-8")
            if checkpoint.save:
                remove_markers(Path(checkpoint.save))
        asked, done = loaded.config.training.train_iters, current.position.iteration
        if done > asked:
            current.reporter.note(
                f"{done} iterations are done, --train-iters asks for {asked}: nothing is trained"
            )
        stop = train(current)
        if stop is not None:
            current.reporter.note(f"stopped at iteration {current.position.iteration}: {stop.reason}")
        if checkpoint.export_hf and not (stop and stop.is_preempted):
            export(current, Path(checkpoint.export_hf))
        end(current, stop)
    current.engine.context.leave()


def end(current, stop) -> None:
    """Leave a marker of how the run ended. Raises Preempted where it should be started again."""
    from mkd.operations.markers import DONE, PREEMPTED, write_marker

    save, position = current.config.checkpoint.save, current.position
    is_preempted = stop is not None and stop.is_preempted
    is_done = position.iteration >= current.config.training.train_iters and not current.due
    if save and _is_rank_0() and (is_preempted or is_done):
        write_marker(Path(save), PREEMPTED if is_preempted else DONE, position, stop.reason if stop else "")
    if is_preempted:
        raise Preempted(stop.reason, *what_is_kept(current), code="preempted")


def what_is_kept(current) -> tuple[str, str]:
    """(What there is of a run that was told to end, what to do)."""
    save, iteration, again = (
        current.config.checkpoint.save,
        current.position.iteration,
        "start the same command again",
    )
    if iteration > current.kept_iteration:
        return "there is no --save: the steps of this run are lost", f"{again}, with --save DIR --load DIR"
    if current.kept_in is None:
        return "no step was done: there is nothing to save", again
    if save is not None and current.kept_in.parent == Path(save):
        again += ", without --ckpt-step" if current.config.checkpoint.ckpt_step is not None else ""
        again += f", with --load {save}"
    return f"iteration {iteration} is saved in {current.kept_in}", again


def leave(exit_code: int) -> None:
    """End the process: nothing changes its exit code any more, though schedulers may go on sending signals.

    The interpreter's own end is left out: threads of libraries that still run may abort it. After a failure nothing is
    waited for at all, as groups of ranks may be gone.
    """
    ignore_signals()
    if exit_code in (EXIT_DONE, EXIT_PREEMPTED):
        atexit._run_exitfuncs()  # what libraries want to do in the end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def make_folders(*folders: str | Path | None) -> None:
    """Make what the run will write to, so that a wrong path ends it now and not after its last step."""
    for folder in filter(None, folders):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make {folder}: {error}",
                "the run writes there",
                "choose another one",
                code="folder-not-writable",
            ) from error


def export(current, folder: Path) -> None:
    """Write the student as a Hugging Face folder."""
    from mkd.checkpoint.hf.hf_writer import export_hf

    with current.engine.parameters_gathered():
        export_hf(
            [(chunk, chunk.first_layer) for chunk in current.state.models],
            current.state.models[0].shape,
            folder,
            context=current.engine.context,
            assets=current.assets,
        )
    current.reporter.note(f"exported the student to {folder}")


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
