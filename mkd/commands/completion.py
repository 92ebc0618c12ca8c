"""Print a script that completes commands and flags in a shell: bash or zsh.

    source <(mkd completion bash)                       # in this shell
    mkd completion bash >> ~/.bash_completion           # in every new one
    mkd completion zsh >> ~/.zshrc

Commands, their parts, flags and error codes are those of the installed version. Anything else is completed
as a file.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from importlib import import_module

from mkd.config.flags import FlagParser, known_flags
from mkd.error_codes.code_meanings import MEANINGS
from mkd.errors import returns_exit_code

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
TAKE_RUN_FLAGS = ("train", "plan", "evaluate", "topk", "hidden", "init", "distill", "data check")
PARTS = {"data": ("preview", "check", "convert-records")}
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Print the script."""
    parser = FlagParser("mkd completion", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that reads the script")
    shell = parser.parse_args(argv).shell
    print((ZSH if shell == "zsh" else "") + script(), end="")


def script() -> str:
    """Return the script, which zsh reads too."""
    from mkd.__main__ import COMMANDS

    names = [f"{name} {part}" for name in COMMANDS for part in PARTS.get(name, ("*",))]
    cases = "".join(f"        {_pattern(name)}) words='{' '.join(_flags(name))}' ;;\n" for name in names)
    second = PARTS | {"explain": sorted(code for codes in MEANINGS.values() for code in codes)}
    second |= {"completion": ["bash", "zsh"]}
    places = "".join(f"        {name}) words='{' '.join(words)}' ;;\n" for name, words in second.items())
    return f"""_mkd() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{" ".join(COMMANDS)}'
    elif [ "${{word#--}}" != "$word" ]; then
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}        esac
    elif [ "$COMP_CWORD" -eq 2 ]; then
        case "${{COMP_WORDS[1]}}" in
{places}        esac
    fi
    [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mkd mkd
"""


def _pattern(name: str) -> str:
    return name.replace(" ", "\\ ")


def flags_of(command: str) -> list[str]:
    """Return the flags in the help of a command and of its parts, and those of a run if it takes them."""
    return sorted({flag for part in PARTS.get(command, ("*",)) for flag in _flags(f"{command} {part}")})


def _flags(name: str) -> list[str]:
    """Return the flags of `COMMAND PART`, or of `COMMAND *`: a command without parts."""
    name = name.removesuffix(" *")
    if name == "completion":
        return ["--help"]
    command, *part = name.split()
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        import_module(f"mkd.commands.{command.replace('-', '_')}").main([*part, "--help"])
    found = FLAG.findall(text.getvalue())
    return sorted({*found, *(known_flags() if name in TAKE_RUN_FLAGS else ())})
