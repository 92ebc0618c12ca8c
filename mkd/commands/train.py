"""Distil a teacher into a student: `mkd train`, and `pretrain_kd.py` in a checkout."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from mkd.config.flags import NUM_RANKS, FlagParser, whole_number
from mkd.errors import ErrorList, MkdError, collect_error, returns_exit_code

OTHER_SPELLINGS = ("--nproc_per_node",)  # torchrun's older one
EVERY_GPU = 0  # processes: as many as there are GPUs


def main(argv: Sequence[str] | None = None, processes: int = EVERY_GPU) -> int:
    """Train on `processes` ranks, unless the flag or a launcher such as torchrun gives their number.

    A rank ends the process with the exit code instead of returning it: see `leave`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    from mkd.operations.launch.local_ranks import is_started_by_launcher

    if is_started_by_launcher():
        return refuse(words) if given_ranks(words) else train(words)
    asks_for_help = bool({"-h", "--help", "--help-all"} & set(words))
    return train(words) if asks_for_help else start(words, processes)


def given_ranks(words: Sequence[str]) -> bool:
    """Return True if the command line gives the number of ranks, maybe a wrong one."""
    return any(word.partition("=")[0] in (NUM_RANKS, *OTHER_SPELLINGS) for word in words)


@returns_exit_code
def refuse(words: list[str]) -> int:
    """Raise the error of a number of ranks for a command that is one of several ranks itself."""
    from mkd.operations.launch.local_ranks import ranks_given_twice

    raise ranks_given_twice(NUM_RANKS)


@returns_exit_code
def start(words: list[str], processes: int) -> int:
    """Start the ranks of this machine, or train in this process if there is to be one."""
    parser = FlagParser("mkd train", add_help=False, allow_abbrev=False)
    parser.add_argument(NUM_RANKS, *OTHER_SPELLINGS, type=whole_number, dest="num_ranks")
    own, rest = parser.parse_known_args(words)
    from mkd.operations.launch.local_ranks import run_ranks, visible_gpus

    num_ranks = own.num_ranks or processes or max(1, visible_gpus())
    if num_ranks == 1:
        return train(rest)
    check(rest, num_ranks)
    why = NUM_RANKS if own.num_ranks else f"one per GPU, because {NUM_RANKS} is not given"
    print(f"starting {num_ranks} processes on this machine: {why}", flush=True)
    return run_ranks([sys.executable, "-m", "mkd", "train", *rest], num_ranks)


def check(words: list[str], num_ranks: int) -> None:
    """Raise ErrorList for what can be refused before any rank starts, within a second."""
    from mkd.config.load import load_config
    from mkd.operations.run_folders import with_save_folder
    from mkd.plan.advice.auto_processes import is_open, open_problems
    from mkd.plan.sides import student_processes
    from mkd.run.early_checks import early_problems

    config = with_save_folder(load_config(words).config)
    problems: list[MkdError] = []
    if is_open(config):  # ranks know the memory that the place of the teacher depends on
        problems += open_problems(config)
    else:
        of_student = collect_error(problems, lambda: student_processes(config, num_ranks))
        problems += early_problems(config, of_student) if of_student else ()
    if problems:
        raise ErrorList(problems)


def train(words: list[str]) -> int:
    """Train as one rank, and end the process."""
    from mkd.run.main import leave
    from mkd.run.main import main as run

    leave(run(words, signals_afterwards=signal.SIG_IGN))
