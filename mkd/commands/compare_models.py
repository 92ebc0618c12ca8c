"""The part of `mkd compare` that compares two models."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.config.flags import add_overwrite, require_new_file, require_writable, whole_number
from mkd.data.files.named_files import require_files
from mkd.errors import EXIT_DONE, UsageError
from mkd.human import counted

TOKENS, SEQ_LENGTH = 65536, 1024
ONLY_MODELS = ("tokens", "seq_length", "dtype", "out", "overwrite")
ONLY_RUNS = ("eps", "keys")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that compare models."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--data", nargs="+", metavar="FILE", help="files of records, as for training: compare two models"
    )
    group.add_argument(
        "--tokens",
        type=partial(whole_number, least=2),
        metavar="N",
        help=f"tokens to compare on: the beginnings of the documents first (default: {TOKENS})",
    )
    group.add_argument(
        "--seq-length",
        type=partial(whole_number, least=2),
        metavar="N",
        help=f"tokens of a sequence (default: {SEQ_LENGTH})",
    )
    group.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="dtype of both models (default: bf16, on a CPU fp32)"
    )
    group.add_argument("--out", type=Path, metavar="FILE.json", help="file to also write the figures to")
    add_overwrite(parser, "--out")


def refuse_model_flags(args: argparse.Namespace) -> None:
    """Raise UsageError if models are named, or a flag is given, that needs --data."""
    given = [name for name in ONLY_MODELS if getattr(args, name)]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is given without --data",
            "it is for the comparison of two models",
            "give --data FILE, or leave it out",
            code="remove-flag",
        )
    for name in (args.a, args.b):
        folder = Path(name)
        if (folder / "config.json").is_file() and not (folder / "metrics.jsonl").exists():
            raise UsageError(
                f"{name} is the folder of a model",
                "without --data two runs are compared",
                "give --data FILE with text to compare the models on",
                code="add-flag",
            )


def compare_two_models(args: argparse.Namespace) -> int:
    """Compare the models, print the figures and return the exit code."""
    given = [name for name in ONLY_RUNS if getattr(args, name) is not None]
    if given:
        raise UsageError(
            f"--{given[0]} is given with --data",
            "it is for the comparison of two runs",
            "leave it out",
            code="remove-flag",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = "models are compared in one process, and torchrun has started several"
        error = UsageError(
            what, "all would do the same", "run it without torchrun", code="number-of-processes"
        )
        error.on_all_ranks = True
        raise error
    for path in args.data:
        require_files(path, "--data")
    require_new_file("--out", args.out, args.overwrite)
    if args.out is not None:
        require_writable("--out", args.out)
    share_cores()
    from mkd.platform import detect

    device = detect().device  # before Megatron is imported, to silence its warnings
    from mkd.evaluation.model_comparison import ComparisonRequest, compare_models

    sizes = args.tokens or TOKENS, args.seq_length or SEQ_LENGTH
    request = ComparisonRequest(args.a, args.b, tuple(args.data), *sizes, dtype=args.dtype)
    found = compare_models(request, device, print)
    print(f"A {args.a}\nB {args.b}\n{counted(found.num_tokens, 'loss token')} of {', '.join(args.data)}")
    print("\n".join(found.lines()))
    if args.out is not None:
        figures = dict(a=args.a, b=args.b, data=args.data) | found.as_dict()
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return EXIT_DONE
