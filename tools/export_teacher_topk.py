"""Store a teacher's top-k log-probabilities once, and train from them with `pretrain_kd.py --teacher-topk DIR`.

    python tools/export_teacher_topk.py --out DIR --k 128 --teacher-hf TEACHER --student-hf STUDENT --data-path ...
    torchrun --nproc-per-node N tools/export_teacher_topk.py --out DIR --config RUN.yaml

All other flags are those of pretrain_kd.py; the ones that matter are --teacher-hf or --teacher-load, the data flags,
--seq-length, --kd-temperature, --bf16, --micro-batch-size and the parallel sizes. Give the data flags of the run that will
train from it, and its --student-hf. An export that was stopped goes on when it is started again. Exit codes: those of
pretrain_kd.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.config.load import load_config  # noqa: E402
from mkd.errors import UsageError, returns_exit_code  # noqa: E402


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the export's own flags, those of the run)."""
    parser = FlagParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the cache, seen by all processes"
    )
    parser.add_argument(
        "--k",
        type=int,
        default=128,
        metavar="N",
        help="ids of each position; more is larger and closer to the full divergence (default 128)",
    )
    parser.add_argument(
        "--logprob-dtype",
        choices=("float16", "float32"),
        default="float16",
        help="of the stored log-probabilities; float32 takes half as much again (default float16)",
    )
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=256,
        metavar="N",
        help="packs of a file, and what an "
        "interruption loses at most on each data-parallel rank (default 256)",
    )
    return parser.parse_known_args(argv)


@returns_exit_code
def main(argv: list[str]) -> None:
    """Run the export; returns the exit code."""
    args, rest = parse(argv)
    export(args, rest, rank=int(os.environ.get("RANK", "0")))


def export(args: argparse.Namespace, rest: list[str], rank: int) -> None:
    config = load_config(rest).config
    if args.samples_per_shard < 1:
        raise UsageError(
            f"--samples-per-shard is {args.samples_per_shard}", "a file holds at least one pack", "raise it"
        )
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, whose remarks it quiets
    from mkd.operations.console import LOG, console
    from mkd.run.topk_export import ExportSettings, export_teacher

    settings = ExportSettings(args.out, args.k, args.logprob_dtype, args.samples_per_shard)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with console(rank):
        meta = export_teacher(config, settings, platform, world_size)
        size = sum(path.stat().st_size for path in args.out.glob("*.parquet")) if rank == 0 else 0
        LOG.info(f"{sum(meta.parts.values())} packs, k = {meta.k}, {size / 2**20:.1f} MiB in {args.out}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
