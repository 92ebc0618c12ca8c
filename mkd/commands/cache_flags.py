"""Flags and checks that `mkd topk` and `mkd hidden` share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.config.flags import FlagParser
from mkd.config.load import load_config
from mkd.config.models import EXPORTED
from mkd.errors import ErrorList, MkdError, UsageError
from mkd.human import counted

if TYPE_CHECKING:  # they load torch
    from mkd.data.stored.cache_meta import CacheMeta
    from mkd.run.stored.cache_description import ExportSettings
    from mkd.run.stored.cache_export import CacheKind


def cache_parser(command: str, description: str | None, samples_per_shard: int) -> FlagParser:
    """Return a parser of the flags of an export, with this default of packs per file."""
    parser = FlagParser(command, description, allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write, visible to all processes"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the export of another teacher, other data or other settings in --out. An export of the "
        "same ones is resumed",
    )
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=samples_per_shard,
        metavar="N",
        help="packs per file. An interruption loses at most one file on each data-parallel rank "
        f"(default: {samples_per_shard})",
    )
    return parser


def export(
    args: argparse.Namespace,
    rest: list[str],
    build: Callable[[ExportSettings], CacheKind],
    text: Callable[[CacheMeta], str],  # what a description says besides the number of packs
) -> None:
    """Run the export of the flags `args` and those of a run, `rest`."""
    config = load_config(rest).config
    if args.samples_per_shard < 1:
        raise UsageError(
            f"--samples-per-shard is {args.samples_per_shard}",
            "a file holds at least one pack",
            "raise it",
            code="out-of-range",
        )
    from mkd.run.early_checks import early_model_problems

    rank, world_size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    problems = early_model_problems(config, world_size, EXPORTED) if config.teachers else []
    problems += model_beside_cache(args.out)
    if problems:
        raise ErrorList(problems)
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, to silence its warnings
    from mkd.data.workers import worker_deaths_explained
    from mkd.operations.console import LOG, console
    from mkd.run.stored.cache_description import ExportSettings
    from mkd.run.stored.cache_export import export_teacher

    settings = ExportSettings(args.out, args.samples_per_shard, overwrite=args.overwrite)
    with console(rank), worker_deaths_explained():
        meta = export_teacher(config, build(settings), platform, world_size)
        if meta is None:
            LOG.info("the checks passed; with --dry-run nothing is written")
            return
        size = sum(path.stat().st_size for path in args.out.glob("*.*") if path.is_file()) if rank == 0 else 0
        packs = counted(sum(meta.parts.values()), "pack")
        LOG.info(f"{packs}, {text(meta)}, {size / 2**20:.1f} MiB in {args.out}")


def model_beside_cache(out: Path) -> list[MkdError]:
    """Return an error if the cache would lie in a model's folder, which --overwrite does not replace."""
    if model_in_the_way("--out", out) is None:
        return []
    why = "the files of a cache and of a model would be mixed"
    what = f"--out {out} holds a model"
    return [UsageError(what, why, "choose another folder", code="choose-another-folder")]
