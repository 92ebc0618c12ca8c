"""Convert a Megatron distributed checkpoint to a Hugging Face folder.

The folder holds weights, index, configuration and tokenizer. Every checkpoint of mkd holds its configuration
and tokenizer; for others give the model's folder to --reference-hf. One process converts any model that fits
in its memory; under torchrun the parallel sizes split the model. They may differ from those of the run that
saved the checkpoint, and do not change the result. A model card (README.md) has the figures of the run.

    mkd export --load CKPT --hf-out DIR
    mkd export --load CKPT --hf-out DIR --push-to-hub NAME
    mkd export --load CKPT --hf-out DIR --gguf FILE.gguf
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkd.commands.convert import DTYPES, add_layout_arguments, run_conversion
from mkd.config.flags import FlagParser
from mkd.errors import returns_exit_code
from mkd.release.gguf_file import TYPES


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser("mkd export", __doc__)
    parser.add_argument(
        "--load", type=Path, required=True, metavar="CKPT", help="folder of --save, or one iter_* folder"
    )
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="iteration to export (default: the latest)"
    )
    parser.add_argument("--hf-out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model that --hf-out, --gguf or the hub holds"
    )
    parser.add_argument(
        "--reference-hf",
        metavar="DIR_OR_ID",
        help="source of the configuration (default: CKPT); the tokenizer, stop ids and image processor in "
        "CKPT take precedence",
    )
    parser.add_argument(
        "--lora-out",
        type=Path,
        metavar="DIR",
        help="folder to write the adapters of a LoRA student to, as PEFT loads them. --hf-out has them added "
        "to the weights of --reference-hf, the model that the run started from (default: no such folder)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the files (default: as in the checkpoint)")
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="log folder of the run, for the card (default: --load)"
    )
    after = parser.add_argument_group("after the export")
    after.add_argument(
        "--push-to-hub",
        metavar="NAME",
        help="repository of the hub to upload to: NAME, or ORGANISATION/NAME. A new one is private",
    )
    after.add_argument(
        "--gguf", type=Path, metavar="FILE", help="GGUF file to write, with llama.cpp's converter"
    )
    after.add_argument(
        "--gguf-type",
        choices=TYPES,
        default="auto",
        help="type of its numbers (default: auto, as the export's)",
    )
    add_layout_arguments(parser)
    run_conversion("mcore_to_hf", parser.parse_args(argv))
