"""Let a teacher write the data of a student: completions of prompts, as records to train from.

    mkd generate --teacher Qwen/Qwen3-8B --prompts prompts.jsonl --out written.jsonl
    mkd generate --teacher T --prompts math.jsonl --samples-per-prompt 8 \\
        --reward my_rewards:exact --min-reward 1 --keep-best 2 --out written.jsonl
    mkd train --student-hf STUDENT --data-path written.jsonl --kd-ratio 0 ...

Prompts have `prompt` (a text) or `messages` (answered in the teacher's chat template), as --prompt-data-path
of a run. The output has `prompt` with `completion`, or `messages`. To resume after a stop, run the same
command again: FILE.jsonl.generated holds what is finished. docs/generate.md describes all of it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.chat.generation import Generation
from mkd.commands.text_flags import (
    add_completion_flags,
    add_prompt_flags,
    num_ranks,
    run_here_or_in_ranks,
    with_names_of_here,
)
from mkd.config.flags import NUM_RANKS, FlagParser, require_new_file, require_writable, whole_number
from mkd.data.files.named_files import require_files
from mkd.errors import ErrorList, MkdError, UsageError, collect_error, raise_all, returns_exit_code
from mkd.generate.generate_settings import (
    MAX_FAILED_REWARDS,
    REWARD_TIMEOUT_S,
    SERVER_TIMEOUT_S,
    Filter,
    GenerateSettings,
    Layout,
    Server,
)
from mkd.generate.work_folder import WorkFolder
from mkd.kinds.sampled.sources.vllm_server import address_problems
from mkd.plan.checks.no_effect import no_effect
from mkd.tokenizers.chat_input import ChatSettings

MAX_NEW_TOKENS, TEMPERATURE, TOP_P, SLOTS = 1024, 1.0, 1.0, 32


def build_parser() -> FlagParser:
    """Return the parser of the command."""
    parser = FlagParser("mkd generate", __doc__)
    parser.add_argument(
        "--teacher",
        required=True,
        metavar="TEACHER",
        help="model that writes: folder or hub id, folder of checkpoints, or log folder of a run",
    )
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="PATH", help="prompts: paths as of --data-path"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="file to write")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace --out of another job, or a job with other settings. The same job is resumed",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, show the first prompt, and write nothing"
    )
    _add_model_flags(parser)
    add_completion_flags(parser, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)
    prompts = parser.add_argument_group("prompts")
    add_prompt_flags(prompts)
    prompts.add_argument(
        "--max-bad-records",
        type=lambda text: whole_number(text, 0),
        default=0,
        metavar="N",
        help="records of each file that may be no prompts: they are skipped (default: 0)",
    )
    _add_filter_flags(parser)
    _add_server_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes and memory")
    group.add_argument("--dtype", choices=("bf16", "fp32"), help="dtype (default: bf16, on a CPU fp32)")
    group.add_argument(
        NUM_RANKS, type=whole_number, metavar="N", help="processes that share the prompts (default: 1)"
    )
    for name, what in (
        ("tensor", "processes that share every layer"),
        ("pipeline", "processes that share the layers"),
        ("expert", "processes that share the experts"),
    ):
        group.add_argument(
            f"--{name}-model-parallel-size",
            type=whole_number,
            default=1,
            metavar="N",
            help=f"{what} of one copy of the teacher (default: 1)",
        )
    group.add_argument(
        "--slots",
        type=whole_number,
        default=SLOTS,
        metavar="N",
        help=f"completions that a copy samples at the same time (default: {SLOTS})",
    )


def _add_filter_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which completions are kept")
    group.add_argument(
        "--truncated",
        choices=("drop", "keep"),
        default="drop",
        help="completions that the teacher did not end: drop them, or keep them, which teaches the student "
        "to stop there (default: drop)",
    )
    group.add_argument(
        "--reward",
        metavar="MODULE:FUNCTION",
        help="function that judges completions, function(prompt, completion, fields), as of mkd train",
    )
    group.add_argument(
        "--min-reward", type=float, metavar="X", help="drop completions whose reward is lower (default: none)"
    )
    group.add_argument(
        "--keep-best",
        type=whole_number,
        metavar="N",
        help="keep only the N completions of a prompt with the highest rewards (default: all)",
    )
    group.add_argument(
        "--max-failed-rewards",
        type=lambda text: whole_number(text, 0),
        default=MAX_FAILED_REWARDS,
        metavar="N",
        help="completions of a process whose reward may fail: these are dropped "
        f"(default: {MAX_FAILED_REWARDS})",
    )
    group.add_argument(
        "--reward-timeout-s",
        type=float,
        default=REWARD_TIMEOUT_S,
        metavar="X",
        help=f"seconds that the function may take for a completion (default: {REWARD_TIMEOUT_S:g})",
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a server")
    group.add_argument(
        "--server-url",
        metavar="URL",
        help="vLLM server with the teacher's weights, http://127.0.0.1:PORT. Only small files of --teacher "
        "are read, and --slots requests run at a time (default: the processes of the command sample)",
    )
    group.add_argument(
        "--server-model", metavar="NAME", help="its name on the server (default: the only one)"
    )
    group.add_argument(
        "--server-remote", action="store_true", help="allow a server on another machine (default: refuse it)"
    )
    group.add_argument(
        "--server-timeout-s",
        type=float,
        default=SERVER_TIMEOUT_S,
        metavar="X",
        help="seconds until a request counts as failed. It is then tried three times more "
        f"(default: {SERVER_TIMEOUT_S:g})",
    )


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Write the data and return the exit code."""
    args = build_parser().parse_args(argv)
    require_server_flags(args)
    return run_here_or_in_ranks("generate", args, argv, lambda: generate(settings_of(args)))


def require_server_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for an address that is not valid, and for flags of a server without one."""
    if args.server_url is None:
        given = {"--server-model": args.server_model, "--server-remote": args.server_remote}
        given["--server-timeout-s"] = args.server_timeout_s != SERVER_TIMEOUT_S
        raise_all(
            [no_effect(flag, "there is no server", "add --server-url URL") for flag in given if given[flag]]
        )
        return
    problems = [*address_problems(args.server_url, args.server_remote, "--server-url", "server-remote")]
    if (args.nproc_per_node or num_ranks()) > 1:
        what, why = f"{args.nproc_per_node or num_ranks()} processes and --server-url", "one asks the server"
        do = "leave out --nproc-per-node; --slots says how many requests run at a time"
        problems.append(UsageError(what, why, do, code="number-of-processes"))
    for one in problems:
        one.on_all_ranks = True
    raise_all(problems)


def settings_of(args: argparse.Namespace) -> GenerateSettings:
    """Return the settings of the flags. Raises UsageError."""
    return GenerateSettings(
        teacher=args.teacher,
        prompts=tuple(args.prompts),
        out=args.out,
        generation=Generation(
            args.max_new_tokens, args.temperature, args.top_p, args.seed, args.samples_per_prompt, args.slots
        ),
        filter=Filter(
            args.reward,
            args.reward_timeout_s,
            args.max_failed_rewards,
            args.min_reward,
            args.keep_best,
            args.truncated,
        ),
        chat=ChatSettings.from_flags("auto", args.chat_template_kwargs, args.chat_date),
        system=args.system,
        as_chat=args.chat,
        dtype=args.dtype,
        layout=Layout(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.expert_model_parallel_size,
        ),
        server=Server(args.server_url, args.server_model, args.server_timeout_s) if args.server_url else None,
        max_bad_records=args.max_bad_records,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
    )


def generate(settings: GenerateSettings) -> int:
    """Check the settings, then generate. Return the exit code."""
    require_possible(settings)
    share_cores()
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, to silence its warnings
    from mkd.generate.generate_texts import generate as run
    from mkd.operations.console import console

    with console(int(os.environ.get("RANK", "0"))):
        run(settings, platform, num_ranks())
    return 0


def require_possible(settings: GenerateSettings) -> None:
    """Raise all problems that are found before torch is imported, as one error."""
    from mkd.run.early_checks import early_model_problems, model_shape

    problems: list[MkdError] = settings.problems()
    if os.environ.get("RANK", "0") == "0":  # it alone writes, on its own machine
        collect_error(problems, lambda: require_writable("--out", settings.out))
    if not WorkFolder(settings.out, {}, {}).path.exists():  # else the same job may be resumed
        collect_error(problems, lambda: require_new_file("--out", settings.out, settings.overwrite))
    for path in settings.prompts:
        collect_error(problems, partial(require_files, path, "--prompts"))
    config = collect_error(problems, lambda: settings.config(is_cuda=False))
    if config is not None and settings.server is None:
        problems += early_model_problems(config, num_ranks(), teacher=0)
    elif config is not None:
        model_shape(problems, config, teacher=0)
    if problems:
        error = ErrorList([with_names_of_here(one) for one in problems])
        error.on_all_ranks = True
        raise error
