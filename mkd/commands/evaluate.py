"""Score a model on held-out tasks by likelihood, at any layout, without training (docs/evaluation.md).

    mkd evaluate --multiple-choice mmlu.jsonl --completions HumanEval.jsonl.gz \\
        --student-hf DIR --seq-length 2048
    mkd evaluate --nproc-per-node 4 --completions mbpp.jsonl --config RUN.yaml --student-load CKPT

All other flags, and the exit codes, are those of mkd train, but a signal ends it at once. The relevant
ones are the model (--student-hf, or --student-load for a folder written by --save), the packs
(--seq-length, --micro-batch-size), --bf16 and the parallel sizes. Without task flags the files are those of
the configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.config.flags import (
    NUM_RANKS,
    FlagParser,
    add_overwrite,
    require_new_file,
    require_writable,
    whole_number,
)
from mkd.config.load import load_config
from mkd.errors import ErrorList, UsageError, returns_exit_code
from mkd.operations.launch.local_ranks import is_started_by_launcher, ranks_given_twice, run_ranks


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return (the tool's own flags, those of a run)."""
    parser = FlagParser("mkd evaluate", __doc__, allow_abbrev=False)
    parser.add_argument(
        "--multiple-choice",
        nargs="+",
        metavar="FILE",
        help="files of questions, choices and answers (JSON lines)",
    )
    parser.add_argument(
        "--completions", nargs="+", metavar="FILE", help="files of prompts and completions (JSON lines)"
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="answered examples before each question (default: 0)"
    )
    parser.add_argument(
        "--styles",
        nargs="+",
        choices=("letter", "continuation"),
        default=["letter", "continuation"],
        help="ways to answer: compare the letters of listed options, or their texts (default: both)",
    )
    parser.add_argument(
        NUM_RANKS, type=whole_number, metavar="N", help="processes to start on this machine (default: 1)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file to also write the metrics to")
    add_overwrite(parser, "--out")
    return parser.parse_known_args(argv)


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the evaluation and return the exit code."""
    args, rest = parse(argv)
    if args.nproc_per_node is not None and is_started_by_launcher():
        raise ranks_given_twice(NUM_RANKS)
    if (args.nproc_per_node or 1) > 1:
        words = without_ranks(list(sys.argv[1:] if argv is None else argv))
        return run_ranks([sys.executable, "-m", "mkd", "evaluate", *words], args.nproc_per_node)
    evaluate(args, rest, rank=int(os.environ.get("RANK", "0")))
    return None


def without_ranks(words: list[str]) -> list[str]:
    """Return a command line without the number of ranks."""
    parser = FlagParser("mkd evaluate", add_help=False, allow_abbrev=False)
    parser.add_argument(NUM_RANKS)
    return parser.parse_known_args(words)[1]


def evaluate(args: argparse.Namespace, rest: list[str], rank: int) -> None:
    """Read the tasks, score the model, print one metric per line."""
    config = load_config(rest).config
    own = {"eval_multiple_choice": args.multiple_choice, "eval_completions": args.completions}
    given = {name: tuple(paths) for name, paths in own.items() if paths}
    fewshot = {} if args.num_fewshot is None else {"eval_num_fewshot": args.num_fewshot}
    data = replace(config.data, **(given and dict.fromkeys(own, ()) | given), **fewshot)
    if not (data.eval_multiple_choice or data.eval_completions):
        raise UsageError(
            "no task is given",
            "there is nothing to evaluate",
            "give --multiple-choice or --completions FILE",
            code="add-flag",
        )
    if data.eval_num_fewshot < 0:
        raise UsageError(
            f"--num-fewshot {data.eval_num_fewshot} is negative", "", "give 0 or more", code="out-of-range"
        )
    require_new_file("--out", args.out, args.overwrite)
    if args.out is not None and rank == 0:  # which alone writes it, on its own machine
        require_writable("--out", args.out)
    from mkd.run.early_checks import early_model_problems

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    problems = early_model_problems(config, world_size)
    if problems:
        raise ErrorList(problems)
    share_cores()
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, to silence its warnings
    from mkd.data.workers import worker_deaths_explained
    from mkd.evaluation.tasks import read_tasks
    from mkd.operations.console import LOG, console
    from mkd.run.one_model import evaluate_student

    tasks = read_tasks(data.eval_multiple_choice, data.eval_completions, data.eval_num_fewshot, args.styles)
    with console(rank), worker_deaths_explained():
        metrics = evaluate_student(config, tasks, platform, world_size)
        if config.dry_run:
            LOG.info("the checks passed; with --dry-run nothing is scored")
            return
        width = max(map(len, metrics))
        for key, value in metrics.items():
            LOG.info(f"{key:{width}}  {value:.6g}" if isinstance(value, float) else f"{key:{width}}  {value}")
    if args.out is not None and rank == 0:
        try:
            args.out.write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write --out {args.out}: {error}", "", "choose another file", code="not-writable"
            ) from error
