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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkd.commands.cache_flags import cache_parser, export
from mkd.errors import returns_exit_code

if TYPE_CHECKING:  # they load torch
    from mkd.run.stored.cache_description import ExportSettings
    from mkd.run.stored.topk_export import TopKExport


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return (the export's own flags, those of the run)."""
    parser = cache_parser("mkd topk", __doc__, samples_per_shard=256)
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
    return parser.parse_known_args(argv)


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Run the export and return the exit code."""
    args, rest = parse(argv)

    def build(settings: ExportSettings) -> TopKExport:
        from mkd.run.stored.topk_export import TopKExport

        return TopKExport(settings, args.k, args.logprob_dtype)

    def text(meta: Any) -> str:
        return f"k = {meta.k}"

    export(args, rest, build, text)
