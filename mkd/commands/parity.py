"""Compare a model in mkd with the same model in transformers: logits of random documents, both in fp32.

The reference is always transformers on --hf. mkd runs the weights of --load (a Megatron checkpoint), of
--hf-b (another Hugging Face folder), or of --hf itself. The exit code is 0 within the tolerances, 66 beyond.

    mkd parity --hf DIR
    mkd parity --hf DIR --hf-b EXPORTED_DIR
    mkd parity --hf DIR --load CKPT
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.commands.convert import run_conversion
from mkd.config.flags import FlagParser
from mkd.errors import returns_exit_code


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser("mkd parity", __doc__)
    parser.add_argument("--hf", required=True, metavar="DIR_OR_ID", help="reference, run by transformers")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--load", type=Path, metavar="CKPT", help="Megatron checkpoint for mkd")
    source.add_argument(
        "--hf-b", metavar="DIR_OR_ID", help="Hugging Face weights for mkd (default: those of --hf)"
    )
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="iteration of --load (default: the latest)"
    )
    parser.add_argument(
        "--num-documents", type=int, default=4, metavar="N", help="documents in the pack (default: 4)"
    )
    parser.add_argument(
        "--num-tokens", type=int, default=64, metavar="N", help="tokens of the longest document (default: 64)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random ids (default: 0)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="largest max |dlogit| / max |logit| (default: 1e-4)"
    )
    parser.add_argument(
        "--kl-tolerance", type=float, default=1e-8, help="largest KL in nats per token (default: 1e-8)"
    )
    args = parser.parse_args(argv)
    share_cores()
    run_conversion("parity", args)
