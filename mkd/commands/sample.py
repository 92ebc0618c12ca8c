"""Let a student complete prompts, and its teacher beside it, on a CPU or on GPUs.

    mkd sample runs/qwen --prompt "def area(width, height):"
    mkd sample runs/qwen/hf --teacher Qwen/Qwen3-8B --prompts prompts.jsonl \\
        --samples-per-prompt 4 --out samples.jsonl

STUDENT and TEACHER are named as for `mkd chat`. Records have `prompt` (a text that is continued) or
`messages` (answered in the chat template), as --prompt-data-path of a run. The sampler is that of rollouts,
so temperature 1 shows what an on-policy run would train on. --out writes a JSON line for every prompt and
sample; in the log folder of a run, `mkd report` shows a file named samples.jsonl.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.commands.text_flags import (
    add_prompt_flags,
    loaded_writers,
    models_request,
    num_ranks,
    require_models,
    run_here_or_in_ranks,
    text_parser,
)
from mkd.config.flags import add_overwrite, require_new_file, require_writable, whole_number
from mkd.data.files.named_files import require_files
from mkd.errors import EXIT_DONE, UsageError, returns_exit_code
from mkd.human import counted

MAX_NEW_TOKENS, TEMPERATURE, TOP_P, SLOTS = 256, 1.0, 1.0, 32


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Complete the prompts and return the exit code."""
    parser = text_parser("sample", __doc__, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated"
    )
    prompts.add_argument(
        "--prompts",
        nargs="+",
        default=(),
        metavar="PATH",
        help="records to complete: paths as of --data-path",
    )
    add_prompt_flags(prompts)
    prompts.add_argument(
        "--slots",
        type=whole_number,
        default=SLOTS,
        metavar="N",
        help=f"completions that run at the same time (default: {SLOTS})",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="file to write, a JSON line a sample")
    add_overwrite(parser, "--out")
    args = parser.parse_args(argv)
    return run_here_or_in_ranks("sample", args, argv, lambda: sample(args))


def sample(args: argparse.Namespace) -> int:
    """Load the models and complete the prompts. Return the exit code."""
    from mkd.chat.generation import Generation

    generation = Generation(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, args.samples_per_prompt, args.slots
    )
    if not (args.prompt or args.prompts):
        raise UsageError(
            "no prompt is given",
            "there is nothing to complete",
            "give --prompt TEXT or --prompts FILE.jsonl",
            code="add-flag",
        )
    for path in args.prompts:
        require_files(path, "--prompts")
    is_first = os.environ.get("RANK", "0") == "0"
    require_new_file("--out", args.out, args.overwrite)
    if args.out is not None and is_first:
        require_writable("--out", args.out)
    request = models_request(args)
    require_models(request, generation)
    share_cores()
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, to silence its warnings
    from mkd.chat.interruption import Ranks
    from mkd.chat.sampled_prompts import read_asked, show_samples, tokenised, write_samples
    from mkd.chat.writer import open_readers

    asked = read_asked(args.prompt, args.prompts, args.chat, args.system)
    readers = open_readers(request, platform.is_cuda, num_ranks())
    requests = tokenised(readers, asked, generation.samples)
    with loaded_writers(readers, platform) as writers:
        if args.out is None:
            show_samples(writers, asked, requests, generation, Ranks())
            return EXIT_DONE
        file = open(args.out, "w", encoding="utf-8") if is_first else nullcontext()  # noqa: SIM115
        with file as out:
            count = write_samples(writers, asked, requests, generation, out)
        if is_first:
            print(f"{counted(count, 'sample')} in {args.out}")
    return EXIT_DONE
