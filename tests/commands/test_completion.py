"""Complete words in a real bash with the printed script."""

from __future__ import annotations

import subprocess

import pytest

from mkd.__main__ import COMMANDS
from mkd.commands.completion import main, script


def completed(*words: str) -> list[str]:
    """Return what bash offers for the last word of `mkd WORDS`."""
    line = " ".join(f"'{word}'" for word in ("mkd", *words))
    code = f"{script()}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _mkd; echo ${{COMPREPLY[@]}}"
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("dis",), ["distill"]),
        (("train", "--teacher-h"), ["--teacher-hf", "--teacher-hidden"]),
        (("init", "--gpu"), ["--gpu-memory-gib", "--gpus"]),
        (("train", "--config", "fi"), []),  # a file
        (("",), list(COMMANDS)),
        (("data", ""), ["preview", "check", "convert-records"]),
        (("data", "preview", "--hist"), ["--histogram"]),
        (("data", "preview", "--teacher-h"), []),  # no flag of this part
        (("data", "check", "--teacher-h"), ["--teacher-hf", "--teacher-hidden"]),
        (("explain", "already-"), ["already-exists"]),
        (("completion", ""), ["bash", "zsh"]),
    ],
)
def test_bash_completes(words, found):
    assert completed(*words) == found


def test_both_shells_are_printed(capsys):
    assert main(["bash"]) == 0 and capsys.readouterr().out == script()
    assert main(["zsh"]) == 0 and capsys.readouterr().out.endswith(script())
