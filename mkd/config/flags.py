"""The command line: argparse built from the schema, with errors of mkd's own classes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mkd.config.megatron_flags import unsupported
from mkd.config.options import FIRST_TEACHER, Option, all_options, section_types
from mkd.config.other_names import hint
from mkd.errors import MkdError, UsageError

_USAGE = "torchrun --nproc-per-node N -m mkd train [--config FILE.yaml] [--flag value ...]"
_DESCRIPTION = (
    "Distil a teacher language model into a student. "
    "The command line wins over the file, the file over defaults."
)
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


@dataclass
class CommandLine:
    """Values of the command line by path, the YAML file that it names, and all of its errors."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)  # path -> (value, flag)
    config_file: str | None = None
    errors: list[MkdError] = field(default_factory=list)


class FlagParser(argparse.ArgumentParser):
    """Argument parser that raises its errors as `UsageError`, which main prints together with all others."""

    def error(self, message: str) -> NoReturn:
        problem = UsageError(message, "", "see --help", code="command-line-not-valid")
        problem.on_all_ranks = True
        raise problem


def whole_number(text: str, least: int = 1) -> int:
    """Parse a flag's value, as argparse's `type`. Raises argparse.ArgumentTypeError below `least`."""
    number = int(text) if text.isdecimal() else -1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return number


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with a group of flags per section. Values stay text."""
    parser = FlagParser(prog="mkd train", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="YAML file with the same names, or an example of configs/ by its name",
    )
    groups = {"": run}
    for section, cls in section_types().items():
        title = section.removeprefix(FIRST_TEACHER + ".").removesuffix("s[0]")
        groups[section] = parser.add_argument_group(title, cls.__doc__)
    for option in all_options():
        if option.has_flag:
            _add_flag(groups[option.section], option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    arguments: dict[str, Any] = dict(dest=option.path, default=argparse.SUPPRESS)
    if option.is_negation:
        arguments["action"] = "store_true"
    elif option.kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    else:
        arguments["nargs"] = "+" if option.kind is tuple else 1
        choices = "{" + ",".join(option.choices or ()) + "}"
        arguments["metavar"] = choices if option.choices else _METAVARS[option.kind]
    # set afterwards: BooleanOptionalAction of Python 3.10 would add its own default to the text
    group.add_argument(option.flag, **arguments).help = _help(option)


def _help(option: Option) -> str:
    is_silent = option.default is None or option.default == () or "required" in option.help
    default = " ".join(option.default) if option.kind is tuple and not is_silent else option.default
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
    return ["--help", "--config", *(option.flag for option in options), *negations]


def _unknown(flag: str, flags: list[str]) -> UsageError:
    do = hint(flag, flags) or "see --help"
    return UsageError(
        f"{flag} is not a flag of mkd", "an unknown setting would be ignored", do, code="flag-unknown"
    )
