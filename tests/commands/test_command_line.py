"""Check the table of commands: each has its module and its help, and none needs torch to explain itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mkd.__main__ import COMMANDS, main
from mkd.errors import EXIT_CLOSED_PIPE, EXIT_USAGE
from mkd.version import __version__
from tests.reported import reported_codes

ROOT = Path(__file__).resolve().parents[2]
ALL_HELPS = """
import sys
from mkd.__main__ import main
for command in sys.argv[1:]:
    print("===", command)
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code, command
print("===", [name for name in ("torch", "megatron", "transformers", "matplotlib") if name in sys.modules])
"""


def test_commands_and_modules_are_the_same():
    files = [path for path in (ROOT / "mkd/commands").glob("*.py") if "\ndef main(" in path.read_text()]
    assert {path.stem.replace("_", "-") for path in files} == set(COMMANDS)


def test_every_help_is_without_heavy_libraries():
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELPS, *COMMANDS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *helps, modules = done.stdout.split("=== ")[1:]
    assert modules.strip() == "[]"
    assert [help.partition("\n")[0] for help in helps] == list(COMMANDS)
    assert not [name for name, help in zip(COMMANDS, helps, strict=True) if f"mkd {name} [" not in help]


@pytest.mark.parametrize(
    "argv",
    [
        "preprocess --input a --output-prefix p --tokenizer-model t",
        "inspect --input a --student s",
        "projection --student s --teacher t --out o",
    ],
)
def test_a_flag_that_is_gone_says_what_to_use(argv, capsys):
    assert main([*argv.split(), "--characters-per-sample=9"]) == EXIT_USAGE
    error, name = capsys.readouterr().err, argv.partition(" ")[0]
    (code,) = reported_codes(error)
    assert code == f"flag-unknown: --characters-per-sample is not a flag of mkd {name}"
    assert "use one record for each document" in error


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(argv, capsys):
    assert main(argv) == 0
    listed = re.findall(r"^  (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "launch-scripts scripts", "plan --help"])
def test_a_reader_that_leaves_ends_a_command_quietly(command, unbuffered, tmp_path):
    """As `mkd plan ... | head` does. The text meets the closed pipe when it is printed or at the end."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "mkd", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (EXIT_CLOSED_PIPE, "")


def test_closed_streams_do_not_change_the_outcome(tmp_path):
    """As `mkd ... >&- 2>&-` in a script of a scheduler."""
    command = f"exec {sys.executable} -m mkd launch-scripts scripts <&- >&- 2>&-"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment).returncode == 0
    assert list((tmp_path / "scripts").iterdir())


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"mkd {__version__}\n"


@pytest.mark.parametrize(
    ("command", "nearest"), [("trian", "mkd train"), ("launch_scripts", "launch-scripts"), ("xyz", "--help")]
)
def test_an_unknown_command_is_a_usage_error(command, nearest, capsys):
    assert main([command, "--lr", "1"]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert reported_codes(message) == ["command-unknown"] and nearest in message


def test_the_door_is_open_from_anywhere(tmp_path):
    """`python -m mkd` alone prints the help: silence would look as if it had trained."""
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mkd"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: mkd COMMAND"), done.stderr


@pytest.mark.parametrize(
    "argv",
    ["make-student --hf x --out y", "distill t s d --out y", "init t s d --out y", "quickstart --folder y"],
)
def test_commands_of_one_process_name_torchrun(argv, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) == EXIT_USAGE
    what = f"number-of-processes: mkd {argv.split()[0]} runs in one process, and torchrun has started several"
    assert reported_codes(capsys.readouterr().err) == [what] and not list(tmp_path.iterdir())
