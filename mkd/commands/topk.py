"""Export a teacher's top-k log-probabilities once, to train from with `mkd train --teacher-topk DIR`.

    mkd topk --out DIR --k 128 --teacher-hf TEACHER --student-hf STUDENT \\
        --data-path ...
    torchrun --nproc-per-node N -m mkd topk --out DIR --config RUN.yaml

All other flags, and the exit codes, are those of mkd train, but a signal ends it at once. The relevant
ones are --teacher-hf or --teacher-load, the data flags, --seq-length, --kd-temperature, --bf16,
--micro-batch-size and the parallel sizes. Give the data flags and the --student-hf of the run that will train
from the export. To resume an interrupted export, run the same command again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.config.flags import FlagParser
from mkd.config.load import load_config
from mkd.config.models import EXPORTED
from mkd.errors import ErrorList, MkdError, UsageError, returns_exit_code
from mkd.human import counted


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return (the export's own flags, those of the run)."""
    parser = FlagParser("mkd topk", __doc__, allow_abbrev=False)
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
        "--k",
        type=int,
        default=128,
        metavar="N",
        help="ids per position. More take more space and come closer to the full divergence (default: 128)",
    )
    parser.add_argument(
        "--logprob-dtype",
        choices=("float16", "float32"),
        default="float16",
        help="dtype of the log-probabilities. float32 takes half as much space again (default: float16)",
    )
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=256,
        metavar="N",
        help="packs per file. An interruption loses at most one file on each data-parallel rank "
        "(default: 256)",
    )
    return parser.parse_known_args(argv)


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Run the export and return the exit code."""
    args, rest = parse(argv)
    export(args, rest, rank=int(os.environ.get("RANK", "0")))


def model_beside_cache(out: Path) -> list[MkdError]:
    """Return an error if the cache would lie in a model's folder, which --overwrite does not replace."""
    if model_in_the_way("--out", out) is None:
        return []
    why = "the files of a cache and of a model would be mixed"
    what = f"--out {out} holds a model"
    return [UsageError(what, why, "choose another folder", code="choose-another-folder")]


def export(args: argparse.Namespace, rest: list[str], rank: int) -> None:
    config = load_config(rest).config
    if args.samples_per_shard < 1:
        raise UsageError(
            f"--samples-per-shard is {args.samples_per_shard}",
            "a file holds at least one pack",
            "raise it",
            code="out-of-range",
        )
    from mkd.run.early_checks import early_model_problems

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    problems = early_model_problems(config, world_size, EXPORTED) if config.teachers else []
    problems += model_beside_cache(args.out)
    if problems:
        raise ErrorList(problems)
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, to silence its warnings
    from mkd.data.workers import worker_deaths_explained
    from mkd.operations.console import LOG, console
    from mkd.run.stored.topk_description import ExportSettings
    from mkd.run.stored.topk_export import export_teacher

    settings = ExportSettings(
        args.out, args.k, args.logprob_dtype, args.samples_per_shard, overwrite=args.overwrite
    )
    with console(rank), worker_deaths_explained():
        meta = export_teacher(config, settings, platform, world_size)
        if meta is None:
            LOG.info("the checks passed; with --dry-run nothing is written")
            return
        size = sum(path.stat().st_size for path in args.out.glob("*.parquet")) if rank == 0 else 0
        packs = counted(sum(meta.parts.values()), "pack")
        LOG.info(f"{packs}, k = {meta.k}, {size / 2**20:.1f} MiB in {args.out}")
