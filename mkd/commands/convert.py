"""Convert a Hugging Face model folder to a Megatron distributed checkpoint (iteration 0).

The result is for --student-load and --teacher-load. Training can also read the folder itself (--student-hf):
convert when Megatron tools need the checkpoint or many runs start from it. One process converts any model
that fits in its memory; under torchrun the parallel sizes split the model. The checkpoint itself has no
layout.

    mkd convert --hf DIR --save CKPT
    torchrun --nproc-per-node 8 -m mkd convert --hf DIR --save CKPT \\
        --tensor-model-parallel-size 8
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mkd.config.flags import FlagParser
from mkd.errors import MkdError, returns_exit_code

DTYPES = ("bf16", "fp32")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the parallel sizes of a conversion; their product is the number of processes."""
    for name in ("tensor", "pipeline"):
        parser.add_argument(
            f"--{name}-model-parallel-size",
            type=int,
            default=1,
            metavar="N",
            help=f"{name}-parallel ranks (default: 1)",
        )


def run_conversion(name: str, args: argparse.Namespace) -> None:
    """Check the command's flags, and call `mkd.convert.<name>.run` with them. Rank 0 reports all errors."""
    from mkd.convert import conversion_checks

    try:
        getattr(conversion_checks, name)(**vars(args))
        from mkd.platform import detect

        detect()  # before Megatron is imported, to silence its warnings
        import_module(f"mkd.convert.{name}").run(**vars(args))
    except MkdError as error:
        error.on_all_ranks = True  # the error comes from files that all of them read
        raise


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser("mkd convert", __doc__)
    parser.add_argument(
        "--hf", required=True, metavar="DIR_OR_ID", help="Hugging Face folder, or model id to download"
    )
    parser.add_argument(
        "--save", type=Path, required=True, metavar="CKPT", help="folder to write iter_0000000 to"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion in --save, not a run's folder"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the checkpoint (default: bf16 if the files are, else fp32)"
    )
    add_layout_arguments(parser)
    run_conversion("hf_to_mcore", parser.parse_args(argv))
