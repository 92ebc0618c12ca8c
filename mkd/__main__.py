"""The command line of mkd: `mkd COMMAND ...`, and `python -m mkd COMMAND ...` where it is not installed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from mkd.errors import EXIT_DONE, UsageError, returns_exit_code
from mkd.parent_process import end_with_launcher
from mkd.version import __version__

COMMANDS = {  # name -> what it does; the module is mkd.commands.NAME
    "quickstart": "distil a small real model on this machine's CPU, to see how it works",
    "init": "choose the settings of a first run, and write them with their reasons",
    "distill": "choose settings, make the student, train, export and check in one go; resumes",
    "train": "distil a teacher into a student",
    "plan": "predict time and memory of a run, without GPUs or torch",
    "doctor": "check this machine and its Python environment",
    "explain": "explain an error by its code",
    "make-student": "cut a smaller student out of a model",
    "preprocess": "tokenise text once instead of at the start of every run",
    "data": "show training data as models see it, read all of it, or convert records of agents",
    "inspect": "the same as `mkd data preview`",
    "evaluate": "score a model on held-out tasks",
    "chat": "chat with a student, and with its teacher beside it",
    "sample": "let a student and its teacher complete prompts",
    "generate": "let a teacher write the data: completions of prompts, to train from",
    "report": "write one HTML file of curves, tables and events of runs, or draw their curves",
    "compare": "compare the metrics of two runs, or two models on a text",
    "convert": "convert a Hugging Face folder to a Megatron checkpoint",
    "export": "convert a Megatron checkpoint to a Hugging Face folder",
    "parity": "compare a model in mkd with the same model in transformers",
    "serve-check": "compare an export in vLLM with mkd, token by token",
    "projection": "relate the vocabularies of a student and a cross-tokenizer teacher",
    "topk": "store a teacher's predictions, to train from them later",
    "hidden": "store a teacher's hidden states, to train from them with any divergence",
    "completion": "print a script that completes commands and flags in bash or zsh",
    "launch-scripts": "copy the scripts for one machine and for Slurm out of an installed mkd",
}
INSTEAD = {"plot": "mkd report RUN --png FILE"}  # commands of earlier versions
_USAGE = (
    "usage: mkd COMMAND [--flag value ...]\n"
    "       mkd train --nproc-per-node N ...\n"
    "       torchrun --nproc-per-node N -m mkd COMMAND ..."
)


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run `mkd argv` (default: the process's own arguments) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end_with_launcher()
    if not words or words[0] in ("--help", "-h", "help"):
        print(help_text())
        return EXIT_DONE
    if words[0] in ("--version", "version"):
        print(f"mkd {__version__}")
        return EXIT_DONE
    return run(words[0], words[1:])


def run(command: str, argv: list[str]) -> int:
    """Import the command and call its `main` with `argv`. Raises UsageError for an unknown one."""
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        do = f"did you mean `mkd {nearest[0]}`?" if nearest else "`mkd --help` lists the commands"
        do = f"use `{INSTEAD[command]}`" if command in INSTEAD else do
        error = UsageError(f"`{command}` is not a command of mkd", do=do, code="command-unknown")
        error.on_all_ranks = True
        raise error
    module = import_module(f"mkd.commands.{command.replace('-', '_')}")
    return int(module.main(argv))


def help_text() -> str:
    """Return the text of `mkd --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    end = "`mkd COMMAND --help` describes a command. `mkd --version` prints the version."
    return "\n".join([_USAGE, "", "Distil large language models on Megatron-core.", "", *lines, "", end])


if __name__ == "__main__":
    sys.exit(main())
