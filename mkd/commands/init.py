"""Write the settings of a first run as a commented YAML file: mkd init TEACHER STUDENT DATA.

    mkd init Qwen/Qwen3-8B Qwen/Qwen3-1.7B-Base text.jsonl --gpus 8 --gpu-memory-gib 80
    mkd init teacher/ layers:12 text.jsonl        # the student: 12 of the teacher's layers
    mkd init                                      # asks, on a terminal

STUDENT is a Hugging Face folder, a hub id, or the size of a student to cut out of the teacher: 0.5B, 113M or
layers:12. The place of the teacher, the layout, the batch, the steps and the learning rate come from the
sizes of models and text and from the plan; each has its reason beside it. Nothing is loaded, and no GPU is
needed. Flags of mkd train, such as --seq-length, are kept as given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.commands.one_process import require_one_process
from mkd.config.flags import FlagParser, parse_command_line, whole_number
from mkd.errors import ErrorList, UsageError, returns_exit_code

if TYPE_CHECKING:
    from mkd.recipe.first_request import Request

STUDENT_HELP = "Hugging Face folder or hub id of the student, or the size to cut: 0.5B, 113M, layers:12"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mkd init`, which `mkd distill` has too."""
    parser.add_argument("teacher", nargs="?", metavar="TEACHER", help="Hugging Face folder or hub id")
    parser.add_argument("student", nargs="?", metavar="STUDENT", help=STUDENT_HELP)
    parser.add_argument("data", nargs="*", metavar="DATA", help="files of records, as for --data-path")
    parser.add_argument(
        "--gpus",
        type=lambda text: whole_number(text, 0),
        metavar="N",
        help="GPUs of the run, 0 for the CPU (default: those of this machine)",
    )
    parser.add_argument(
        "--gpu-memory-gib", type=float, metavar="X", help="memory of one GPU (default: as nvidia-smi says)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the run (default: runs/STUDENT-from-TEACHER)"
    )


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and print what was chosen."""
    parser = FlagParser("mkd init", __doc__, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the run.yaml that --out has")
    own, rest = divide(argv, parser)
    args = parser.parse_args(own)
    require_one_process("init")
    ask_for_rest(args)
    from mkd.recipe.distill_stages import STATE
    from mkd.recipe.first_run import CONFIG, choose_first_run
    from mkd.recipe.folder_in_use import check_new_file, check_no_distillation, check_no_run

    request = build_request(args, rest)
    if not args.overwrite:
        check_new_file(request.out / CONFIG)
    check_no_distillation(request.out / STATE)
    check_no_run(request, exports_too=False)
    run = choose_first_run(request)
    run.write()
    print(run.summary())


def divide(argv: Sequence[str] | None, parser: FlagParser) -> tuple[list[str], list[str]]:
    """Return (arguments of the parser, flags of mkd train).

    Words after a flag that is not the parser's are its values, up to the next flag.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    own: list[str] = []
    rest: list[str] = []
    known, place = set(parser._option_string_actions), own
    for word in words:
        if word.startswith("--"):
            place = own if word.partition("=")[0] in known else rest
        place.append(word)
    return own, rest


def ask_for_rest(args: argparse.Namespace) -> None:
    """Ask on the terminal for what is missing, if anything is. Raises UsageError without a terminal."""
    if args.teacher and args.student and args.data:
        return
    if not sys.stdin.isatty():
        missing = [name.upper() for name in ("teacher", "student", "data") if not getattr(args, name)]
        raise UsageError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given",
            "there is no terminal to ask on",
            "TEACHER STUDENT DATA [DATA ...] come first, then flags",
            code="add-flag",
        )
    args.teacher = args.teacher or _ask("teacher (folder or hub id)")
    args.student = args.student or _ask("student (folder, hub id, or a size such as 0.5B or layers:12)")
    args.data = args.data or _ask("text (files of records, with spaces between)").split()
    from mkd.recipe.first_request import default_folder, visible_gpus_and_memory

    number, memory = visible_gpus_and_memory()
    if args.gpus is None:
        args.gpus = _ask("GPUs, 0 for the CPU", str(number), partial(whole_number, least=0))
    if args.gpus and args.gpu_memory_gib is None:
        args.gpu_memory_gib = _ask("GiB of memory of one GPU", str(memory or 79.1), float)
    if args.out is None:
        args.out = Path(_ask("folder of the run", str(default_folder(args.teacher, args.student))))


def _ask(question: str, default: str = "", parse: Callable[[str], Any] = str) -> Any:
    """Ask until there is an answer that `parse` takes. Raises UsageError if there are no more answers."""
    while True:
        try:
            answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
        except EOFError as error:
            what, do = "the answers end before the last question", "answer all, or give TEACHER STUDENT DATA"
            raise UsageError(what, f"{question} has none", do, code="add-flag") from error
        try:
            if answer:
                return parse(answer)
        except (ValueError, argparse.ArgumentTypeError) as error:
            print(f"  {error}")


def build_request(args: argparse.Namespace, rest: Sequence[str]) -> Request:
    """Return the request of a command line. Raises ErrorList for flags of mkd train that cannot be read."""
    from mkd.recipe.first_request import Request, default_folder, visible_gpus_and_memory

    given = parse_command_line(rest)
    if given.config_file is not None:
        what, do = (
            "--config is given to a command that writes one",
            "leave it out, or use `mkd train --config`",
        )
        given.errors.append(UsageError(what, "its settings would be chosen twice", do, code="remove-flag"))
    if given.errors:
        raise ErrorList(given.errors)
    gpus, memory = args.gpus, args.gpu_memory_gib
    if gpus is None or (gpus and memory is None):
        number, gib = visible_gpus_and_memory()
        gpus, memory = number if gpus is None else gpus, memory or gib
    out = args.out or default_folder(args.teacher, args.student)
    data, memory = tuple(args.data), memory if gpus else None
    return Request(args.teacher, args.student, data, out, gpus, memory, given.values)
