"""The training command: configuration in, trained student out, exit code to the caller."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from mkd.config.load import LoadedConfig, format_config, load_config, save_config
from mkd.errors import EXIT_DONE, MkdError, Preempted, UsageError
from mkd.train.signals import Signals, caught_signals


def main(argv: list[str]) -> int:
    """Run `pretrain_kd.py argv`; returns the exit code.

    User errors are printed once, on rank 0; one that another rank may have met alone, by that rank with its number.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        loaded = load_config(argv)
        with caught_signals() if loaded.config.training.exit_signal_handler else nullcontext() as signals:
            run(loaded, signals)
    except Preempted as stop:
        if rank == 0:
            print(f"preempted: {stop}", file=sys.stderr, flush=True)
        return stop.exit_code
    except MkdError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif not error.on_all_ranks:
            print(f"rank {rank}: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return EXIT_DONE


def run(loaded: LoadedConfig, signals: Signals | None = None) -> None:
    """Plan, show, build, train, export. Everything that can be refused is refused before processes talk to each other."""
    from mkd.platform import detect, make_deterministic

    if loaded.config.training.deterministic_mode:
        make_deterministic()
    platform = detect()  # before Megatron is imported, whose remarks it quiets
    from mkd.train.loop import train
    from mkd.train.markers import remove_markers
    from mkd.train.own_tokens import log_folder
    from mkd.train.plan import plan_run
    from mkd.train.setup import build_run

    plan = plan_run(loaded.config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    if _is_rank_0():
        print(format_config(loaded), plan.describe(), plan.loss_card(), platform.describe(), sep="\n", flush=True)
    if loaded.config.dry_run:
        return
    if _is_rank_0():
        folder = log_folder(loaded.config)
        make_folders(folder, loaded.config.checkpoint.save, loaded.config.checkpoint.export_hf)
        save_config(loaded, folder / "config.yaml")
        (folder / "loss_card.txt").write_text(plan.loss_card() + "\n", encoding="utf-8")
        if loaded.config.checkpoint.save:
            remove_markers(Path(loaded.config.checkpoint.save))
    current = build_run(plan, platform, signals)
    try:
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
    if is_preempted:
        why = f"iteration {position.iteration} is saved in {save}" if save else "there is no --save: the steps are lost"
        raise Preempted(stop.reason, why, "start the same command again, with --load")


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


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
