"""The command line: argparse built from the schema, with errors of mkd's own classes."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mkd.config.megatron_flags import unsupported
from mkd.config.options import FIRST_TEACHER, Option, all_options, section_types
from mkd.config.other_names import hint
from mkd.errors import MkdError, UsageError

NUM_RANKS = "--nproc-per-node"
"""Flag of `mkd train`, which starts the ranks: it is not a setting of the run."""
_USAGE = f"mkd train [{NUM_RANKS} N] [--config FILE.yaml] [--flag value ...]"
_DESCRIPTION = (
    "Distil a teacher language model into a student. "
    "The command line wins over the file, the file over defaults."
)
FIRST_FLAGS = (  # chosen by hand: what a first real run sets
    "--student-hf",
    "--teacher-hf",
    "--data-path",
    "--seq-length",
    "--global-batch-size",
    "--train-iters",
    "--lr",
    "--bf16",
    "--save",
    "--load",
)
_WIDTH = 100  # columns of the short help
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


@dataclass
class CommandLine:
    """Values of the command line by path, the YAML file that it names, and all of its errors."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)  # path -> (value, flag)
    config_file: str | None = None
    errors: list[MkdError] = field(default_factory=list)


class FlagParser(argparse.ArgumentParser):
    """Argument parser that raises its errors as `UsageError`, which main prints together with all others.

    Its help keeps the lines of `description`, unless another `formatter_class` is given.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog, description=description, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`; the error of an unknown flag says what to use instead."""
        args = [_at_home(word) for word in (sys.argv[1:] if args is None else args)]
        try:
            found, unknown = self.parse_known_args(args, namespace)
        except UsageError:
            if self._subparsers is None:  # else the words are those of a subcommand
                self._refuse_unknown(args)  # it explains what is missing
            raise
        self._refuse_unknown(unknown)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}", self._place_of(unknown[0], args))
        return found

    def _place_of(self, word: str, args: Sequence[str]) -> str:
        """Return where a word of `args` belongs that no flag takes; "" if that is not known."""
        flags, place = self._option_string_actions, args.index(word) if word in args else 0
        before = args[place - 1] if place else ""
        if before in flags and flags[before].nargs == 0:
            off = f"--no-{before.removeprefix('--')}"
            return f"{before} takes no value: leave {word} out" + f", or give {off}" * (off in flags)
        if word.endswith((".yaml", ".yml")) and "--config" in flags:
            return f"name a file of settings with --config {word}"
        valued = args[place - 2] if place > 1 else ""
        takes_one = valued in flags and flags[valued].nargs in (None, 1)
        return f"{valued} takes one value; a value with blanks needs quotes" if takes_one else ""

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise UsageError for the first flag in `words` that the parser does not have."""
        flags = list(self._option_string_actions)
        for flag in (word.partition("=")[0] for word in words if word.startswith("--") and word != "--"):
            is_short = self.allow_abbrev and any(one.startswith(flag) for one in flags)
            if flag not in flags and not is_short:
                problem = _unknown(flag, flags, self.prog)
                problem.on_all_ranks = True
                raise problem

    def error(self, message: str, do: str = "") -> NoReturn:
        see = f"see `{self.prog} --help`"
        problem = UsageError(message, "", do or see, code="command-line-not-valid")
        problem.on_all_ranks = True
        raise problem


def _at_home(word: str) -> str:
    """Return `--flag=~/PATH` with the user's home in it, as shells put it into `--flag ~/PATH`."""
    flag, equals, value = word.partition("=")
    is_home = flag.startswith("--") and value.startswith("~/")
    return flag + equals + os.path.expanduser(value) if is_home else word


def whole_number(text: str, least: int = 1) -> int:
    """Parse a flag's value, as argparse's `type`. Raises argparse.ArgumentTypeError below `least`."""
    number = int(text) if text.isdecimal() else -1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return number


def add_overwrite(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Add --overwrite to a command whose `flags` name files to write."""
    parser.add_argument(
        "--overwrite", action="store_true", help=f"replace the file of {' or '.join(flags)} if it exists"
    )


def require_new_file(flag: str, path: Path | None, overwrite: bool) -> None:
    """Raise UsageError if a command would replace the file that the user has named with `flag`.

    Devices and pipes such as /dev/stdout are written to, not replaced.
    """
    if path is not None and (path.is_file() or path.is_dir()) and not overwrite:
        what, do = f"{flag} {path} exists", "choose another file, or give --overwrite"
        error = UsageError(what, "it would be replaced", do, code="already-exists")
        error.on_all_ranks = True
        raise error


def require_writable(flag: str, path: Path) -> None:
    """Raise UsageError if the file that the user has named with `flag` cannot be written."""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"the folder {path.parent} does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "you may not write there"
    else:
        return
    what = f"cannot write {flag} {path}: {reason}"
    raise UsageError(what, "", "choose another file", code="not-writable")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with a group of flags per section. Values stay text."""
    parser = _empty_parser()
    run = parser.add_argument_group("run")
    run.add_argument("-h", "--help", action=_Help, build=short_help, help="show the flags of a first run")
    run.add_argument("--help-all", action=_Help, build=_long_help, help="describe every flag")
    run.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="YAML file with the same names, or an example of configs/ by its name",
    )
    run.add_argument(
        NUM_RANKS,
        metavar="N",
        help="processes to start on this machine (default: one per visible GPU; 1 without GPUs, with "
        "pretrain_kd.py, and under torchrun or Slurm, which start them)",
    )
    groups = {"": run}
    for section, cls in section_types().items():
        groups[section] = parser.add_argument_group(_title(section), cls.__doc__)
    for option in all_options():
        if option.has_flag:
            _add_flag(groups[option.section], option)
    return parser


def _empty_parser() -> FlagParser:
    options: dict[str, Any] = dict(allow_abbrev=False, add_help=False, formatter_class=argparse.HelpFormatter)
    return FlagParser("mkd train", _DESCRIPTION, usage=_USAGE, **options)


def _title(section: str) -> str:
    return section.removeprefix(FIRST_TEACHER + ".").removesuffix("s[0]")


class _Help(argparse.Action):
    """Print the text that `build` makes, and exit."""

    def __init__(self, option_strings: Sequence[str], build: Callable[[], str], **kwargs: Any):
        super().__init__(option_strings, nargs=0, **{**kwargs, "dest": argparse.SUPPRESS})
        self._build = build

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        print(self._build(), end="")
        parser.exit()


def _long_help() -> str:
    return build_parser().format_help()


def short_help() -> str:
    """Return the help of the flags of a first run, and the names of all others by section."""
    first, by_flag = _empty_parser(), {option.flag: option for option in all_options() if option.has_flag}
    group = first.add_argument_group("the ten flags of a first run")
    for flag in FIRST_FLAGS:
        _add_flag(group, by_flag[flag])
    lines = [first.format_help(), "all flags by section; `mkd train --help-all` describes each:", ""]
    for section, cls in [*section_types().items(), ("", None)]:
        names = ["--config FILE.yaml", f"{NUM_RANKS} N"] * (not section)
        names += [flag for flag, option in by_flag.items() if option.section == section]
        lines.append(
            f"{_title(section) or 'run'}: {(cls.__doc__ or '').splitlines()[0] if cls else ''}".rstrip(": ")
        )
        text = "  ".join(names)
        indents: dict[str, Any] = dict(initial_indent="  ", subsequent_indent="  ")
        lines += [*textwrap.wrap(text, _WIDTH, **indents, break_on_hyphens=False, break_long_words=False), ""]
    return "\n".join(lines)


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    arguments: dict[str, Any] = dict(dest=option.path, default=argparse.SUPPRESS)
    if option.is_negation:
        arguments["action"] = "store_true"
    elif option.kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    else:
        arguments["nargs"] = "+" if option.kind is tuple else 1
        choices = "{" + ",".join(option.choices or ()) + "}"
        value = "|".join([_METAVARS[option.kind], *option.words])
        arguments["metavar"] = choices if option.choices else value
    # set afterwards: BooleanOptionalAction of Python 3.10 would add its own default to the text
    group.add_argument(option.flag, **arguments).help = _help(option)


def _help(option: Option) -> str:
    is_silent = option.default is None or option.default == () or "required" in option.help
    is_silent = is_silent or option.default is False  # the text says what a switch turns on
    default = " ".join(option.default) if option.kind is tuple and not is_silent else option.default
    default = "on" if default is True else default
    text = option.help if is_silent else f"{option.help} (default: {default})"
    return text.replace("%", "%%")


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Read `argv` (without the program's name) and collect all errors. `--help` prints and exits."""
    result = CommandLine()
    known = [argument for group in _by_flag(argv) if _is_known(group, result.errors) for argument in group]
    try:
        given = vars(build_parser().parse_args(known))
    except UsageError as error:
        result.errors.append(error)
        return result
    result.config_file = given.pop("config")
    del given["nproc_per_node"]  # `_is_known` lets no command take it: `mkd train` has removed it
    options = {option.path: option for option in all_options()}
    for path, value in given.items():
        option = options[path]
        try:
            parsed = value if option.kind is bool else option.parse(value, option.flag)
        except UsageError as error:
            result.errors.append(error)
            continue
        result.values[path] = (parsed, "--no-" + option.flag[2:] if parsed is False else option.flag)
    return result


def _by_flag(argv: Sequence[str]) -> list[list[str]]:
    """Cut `argv` before every flag: each part is a flag (`--flag` or `--flag=value`) and its values."""
    groups: list[list[str]] = [[]]
    for argument in argv:
        if argument.startswith("--"):
            groups.append([])
        groups[-1].append(argument)
    return groups


def _is_known(group: list[str], errors: list[MkdError]) -> bool:
    """Return True if argparse knows this part of the command line; otherwise add its error to `errors`."""
    flag = group[0].partition("=")[0] if group else ""
    flags = known_flags()
    if not flag.startswith("--") or flag in flags:
        return True
    errors.append(unsupported(flag, flag) or _unknown(flag, flags))
    return False


def known_flags() -> list[str]:
    """Return every flag that the parser takes."""
    options = [option for option in all_options() if option.has_flag]
    negations = [
        "--no-" + option.flag[2:] for option in options if option.kind is bool and not option.is_negation
    ]
    return ["--help", "--help-all", "--config", *(option.flag for option in options), *negations]


def _unknown(flag: str, flags: list[str], program: str = "mkd") -> UsageError:
    do = hint(flag, flags) or f"see `{'mkd train --help-all' if program == 'mkd' else f'{program} --help'}`"
    return UsageError(
        f"{flag} is not a flag of {program}", "an unknown setting would be ignored", do, code="flag-unknown"
    )
