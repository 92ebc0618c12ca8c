"""Check that a server computes what mkd has trained: load an export in vLLM and compare log-probabilities.

    mkd serve-check runs/qwen/hf
    mkd serve-check runs/qwen/hf --server-python vllm/bin/python

The server continues a few prompts greedily. mkd scores the same tokens in fp32, all in one pack. The check
passes if every log-probability agrees within the tolerance, no token of the server is less likely than mkd's
best one by more than twice that, and both read the prompts as the same tokens. Without vLLM, transformers is
the server. The exit code is 0 if it passes, 66 if not, or if the server cannot run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.config.data_files import require_file
from mkd.config.flags import FlagParser, whole_number
from mkd.errors import EXIT_DONE, UsageError, returns_exit_code


def build_parser() -> FlagParser:
    """Return the parser of the command's flags."""
    parser = FlagParser("mkd serve-check", __doc__)
    parser.add_argument("folder", metavar="DIR_OR_ID", help="exported model, or a hub id")
    parser.add_argument(
        "--server",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="program that serves (default: auto, vLLM where it is installed, else transformers)",
    )
    parser.add_argument(
        "--server-python",
        metavar="PYTHON",
        help="python of the server's own environment (default: the one of mkd)",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="dtype of the server (default: bf16, on a CPU fp32)"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line (default: texts of mkd's own)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=partial(whole_number, least=1),
        default=32,
        metavar="N",
        help="tokens of each continuation (default: 32)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of log-probabilities in nats (default: 1e-3 in fp32, 0.25 in bf16)",
    )
    parser.add_argument(
        "--timeout-s",
        type=partial(whole_number, least=1),
        default=1800,
        metavar="N",
        help="seconds to wait for the server (default: 1800)",
    )
    return parser


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    args = build_parser().parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what, why = (
            "serve-check runs in one process, and torchrun has started several",
            "all would do the same",
        )
        error = UsageError(what, why, "run it without torchrun", code="number-of-processes")
        error.on_all_ranks = True
        raise error
    if args.prompts is not None:
        require_file(str(args.prompts), "--prompts")
    from mkd.checkpoint.hf.hf_hub import resolve_hf

    folder = resolve_hf(args.folder)
    share_cores()
    from mkd.platform import detect

    detect()  # before Megatron is imported, to silence its warnings
    from mkd.serving.serve_check import ServeCheck, run

    run(
        ServeCheck(
            folder,
            args.server,
            args.server_python,
            args.dtype,
            args.prompts,
            args.max_new_tokens,
            args.tolerance,
            args.timeout_s,
        )
    )
    return EXIT_DONE
