"""Flags and checks that `mkd chat`, `mkd sample` and `mkd generate` share."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from mkd.commands.chat_flags import add_template_flags
from mkd.config.flags import NUM_RANKS, FlagParser, whole_number
from mkd.errors import ErrorList, MkdError
from mkd.operations.launch.local_ranks import is_started_by_launcher, ranks_given_twice, run_ranks

if TYPE_CHECKING:  # they load torch
    from collections.abc import Iterator

    from mkd.chat.generation import Generation
    from mkd.chat.named_model import ModelsRequest
    from mkd.chat.writer import Reader, Writer
    from mkd.platform import Platform

MODELS = "Hugging Face folder or hub id, folder of checkpoints, or log folder of a run"


def text_parser(
    command: str, description: str | None, max_new_tokens: int, temperature: float, top_p: float
) -> FlagParser:
    """Return a parser with the models and the settings of completions."""
    parser = FlagParser(f"mkd {command}", description)
    parser.add_argument("student", metavar="STUDENT", help=MODELS)
    parser.add_argument("--teacher", metavar="TEACHER", help="model to show beside it, named alike")
    models = parser.add_argument_group("models")
    models.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="dtype of both models (default: bf16, on a CPU fp32)"
    )
    models.add_argument(
        NUM_RANKS, type=whole_number, metavar="N", help="ranks that share every layer (default: 1)"
    )
    models.add_argument(
        "--tokenizer-model",
        metavar="DIR_OR_ID",
        help="tokenizer of the student (default: that in its folder)",
    )
    add_completion_flags(parser, max_new_tokens, temperature, top_p)
    return parser


def add_prompt_flags(prompts: argparse._ArgumentGroup) -> None:
    """Add how prompts of files are read, and how often they are completed."""
    prompts.add_argument(
        "--chat", action="store_true", help="read every text as a user's message, in the chat template"
    )
    prompts.add_argument(
        "--samples-per-prompt",
        type=whole_number,
        default=1,
        metavar="N",
        help="completions of every prompt (default: 1)",
    )


def add_completion_flags(
    parser: argparse.ArgumentParser, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """Add the settings of completions, with these defaults."""
    settings = parser.add_argument_group("completions")
    settings.add_argument(
        "--max-new-tokens",
        type=whole_number,
        default=max_new_tokens,
        metavar="N",
        help=f"most tokens of a completion (default: {max_new_tokens})",
    )
    settings.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 takes the most probable token, always (default: {temperature:g})",
    )
    settings.add_argument(
        "--top-p",
        type=float,
        default=top_p,
        metavar="P",
        help="sample among the fewest most probable tokens that have this probability together "
        f"(default: {top_p:g})",
    )
    settings.add_argument(
        "--seed", type=int, default=0, metavar="N", help="number that decides all random choices (default: 0)"
    )
    settings.add_argument("--system", metavar="TEXT", help="system prompt (default: none)")
    add_template_flags(settings.add_argument)


def run_here_or_in_ranks(
    command: str, args: argparse.Namespace, argv: Sequence[str] | None, run: Callable[[], int]
) -> int:
    """Return the exit code of `run`, here or on the ranks that --nproc-per-node wants started."""
    if args.nproc_per_node is not None and is_started_by_launcher():
        raise ranks_given_twice(NUM_RANKS)
    if (args.nproc_per_node or 1) > 1:
        parser = FlagParser(command, add_help=False, allow_abbrev=False)
        parser.add_argument(NUM_RANKS)
        _, words = parser.parse_known_args(list(argv if argv is not None else sys.argv[2:]))
        return run_ranks([sys.executable, "-m", "mkd", command, *words], args.nproc_per_node)
    return run()


def models_request(args: argparse.Namespace) -> ModelsRequest:
    """Return the models of the flags, with today's date in their chat templates."""
    from mkd.chat.named_model import ModelsRequest
    from mkd.tokenizers.chat_input import ChatSettings

    chat = ChatSettings.from_flags("auto", args.chat_template_kwargs, args.chat_date).dated()
    return ModelsRequest(args.student, args.teacher, args.dtype, args.tokenizer_model, chat)


def require_models(request: ModelsRequest, generation: Generation) -> None:
    """Raise all problems of flags and models that are found before torch is imported."""
    from mkd.run.early_checks import early_model_problems

    size = num_ranks()
    config = request.config(size, is_cuda=False)
    problems: list[MkdError] = [*generation.problems(), *early_model_problems(config, size)]
    if request.teacher:
        problems += early_model_problems(config, size, teacher=0)
    if problems:
        problems = [with_names_of_here(one) for one in problems]
        error = problems[0] if len(problems) == 1 else ErrorList(problems)
        error.on_all_ranks = True
        raise error


def with_names_of_here(problem: MkdError) -> MkdError:
    """Return the problem of a run's flag with the name that the model has on this command line."""
    renamed = copy.copy(problem)
    for flag, name in (
        ("--student-hf:", "STUDENT:"),
        ("--teacher-hf:", "--teacher:"),
        ("--teacher-hf ", "--teacher "),
    ):
        renamed.what = renamed.what.replace(flag, name)
    return renamed


def num_ranks() -> int:
    """Return the number of ranks that share every layer."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def loaded_writers(readers: Sequence[Reader], platform: Platform) -> Iterator[list[Writer]]:
    """Load the models; leave the process group at the end. Lines about loading go to stderr."""
    from mkd.chat.writer import load_writers

    is_first = os.environ.get("RANK", "0") == "0"
    with redirect_stdout(sys.stderr):
        for one in readers if is_first else ():
            print(f"{one.role:8} {one.describe()}", flush=True)
        writers = load_writers(readers, platform)
    yield writers
    writers[0].context.leave()
