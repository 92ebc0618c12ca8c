"""The training command: configuration in, trained student out, exit code to the caller."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from mkd.config.load import LoadedConfig, format_config, load_config, save_config
from mkd.errors import EXIT_DONE, EXIT_PREEMPTED, Preempted, UsageError
from mkd.train.failures import FailureReports, end_of_rank
from mkd.train.signals import Signals, caught_signals


def main(argv: list[str]) -> int:
    """Run `pretrain_kd.py argv`; returns the exit code.

    User errors are printed once, on rank 0; one that another rank may have met alone, by that rank with its number. Of a
    failure that takes other ranks with it, its first rank has the traceback, and the others a line.
    """
    reports = FailureReports(rank=int(os.environ.get("RANK", "0")), world_size=_world_size())
    try:
        loaded = load_config(argv)
        with caught_signals() if loaded.config.training.exit_signal_handler else nullcontext() as signals:
            run(loaded, signals, reports)
    except Preempted as stop:
        if reports.rank == 0:
            print(f"preempted: {stop}", file=sys.stderr, flush=True)
        return stop.exit_code
    except Exception as error:
        return end_of_rank(error, reports)
    return EXIT_DONE


def run(loaded: LoadedConfig, signals: Signals | None, reports: FailureReports) -> None:
    """Plan, show, build, train, export. Everything that can be refused is refused before processes talk to each other."""
    from mkd.platform import detect, make_deterministic

    if loaded.config.training.deterministic_mode:
        make_deterministic()
    platform = detect()  # before Megatron is imported, whose remarks it quiets
    from mkd.train.folders import log_folder
    from mkd.train.out_of_memory import memory_explained
    from mkd.train.plan import plan_run
    from mkd.train.watchdog import Watchdog

    plan = plan_run(loaded.config, _world_size())
    if _is_rank_0():
        print(format_config(loaded), plan.describe(), plan.loss_card(), platform.describe(), sep="\n", flush=True)
    if loaded.config.dry_run:
        return
    folder = log_folder(loaded.config)
    if _is_rank_0():
        make_folders(folder, loaded.config.checkpoint.save, loaded.config.checkpoint.export_hf)
    reports.folder = folder / "errors"
    watchdog = Watchdog.of(loaded.config.parallel, reports)
    watchdog.start()
    try:
        with memory_explained(plan, reports.rank, reports.world_size):
            carry_out(loaded, plan, platform, signals, watchdog, folder)
    finally:
        watchdog.stop()


def carry_out(loaded: LoadedConfig, plan, platform, signals: Signals | None, watchdog, folder: Path) -> None:
    """Build, train, export."""
    from mkd.train.loop import train
    from mkd.train.markers import remove_markers
    from mkd.train.setup import build_run

    current = build_run(plan, platform, signals, watchdog)
    try:
        if _is_rank_0():  # not before: the folder may be that of another run
            save_config(loaded, folder / "config.yaml")
            (folder / "loss_card.txt").write_text(plan.loss_card() + "\n", encoding="utf-8")
            if loaded.config.checkpoint.save:
                remove_markers(Path(loaded.config.checkpoint.save))
        end(current, train(current))
        if loaded.config.checkpoint.export_hf:
            export(current, Path(loaded.config.checkpoint.export_hf))
    finally:
        current.profiler.close()
        current.reporter.close()
    current.engine.context.leave()


def end(current, stop) -> None:
    """Leave a marker of how the run ended. Raises Preempted where it should be started again."""
    from mkd.train.markers import DONE, PREEMPTED, write_marker

    save, position = current.config.checkpoint.save, current.position
    if stop is not None:
        current.reporter.note(f"stopped at iteration {position.iteration}: {stop.reason}")
    is_preempted = stop is not None and stop.is_preempted
    is_done = position.iteration == current.config.training.train_iters
    if save and _is_rank_0() and (is_preempted or is_done):
        write_marker(Path(save), PREEMPTED if is_preempted else DONE, position, stop.reason if stop else "")
    current.crashes.end()
    if is_preempted:
        why = f"iteration {position.iteration} is saved in {save}" if save else "there is no --save: the steps are lost"
        raise Preempted(stop.reason, why, "start the same command again, with --load")


def leave(exit_code: int) -> None:
    """End the process. After a failure at once: other threads, and groups of ranks that are gone, must not hold it up."""
    if exit_code in (EXIT_DONE, EXIT_PREEMPTED):
        sys.exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def make_folders(*folders: str | Path | None) -> None:
    """Make what the run will write to, so that a wrong path ends it now and not after its last step."""
    for folder in filter(None, folders):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error}", "the run writes there", "choose another one") from error


def export(current, folder: Path) -> None:
    """Write the student as a Hugging Face folder."""
    from mkd.checkpoint.hf_writer import export_hf

    with current.engine.parameters_gathered():
        export_hf(
            [(chunk, chunk.first_layer) for chunk in current.state.models],
            current.state.models[0].shape,
            folder,
            context=current.engine.context,
            reference_dir=current.hf_dir,
        )
    current.reporter.note(f"exported the student to {folder}")


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
