"""The command line of tools/inspect_data.py, and how an alignment is written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mkd.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.xtoken import AlignedText
from mkd.xtoken.align_view import COLOURS, RESET, view_alignment
from tests.tokenizers.trained import train_hf_tokenizer
from tools.inspect_data import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "inspect_data.py"
CHAT = [{"role": "user", "content": "Which fox?"}, {"role": "assistant", "content": "The fox."}]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two tokenizers: words as one token, and bytes only."""
    folders = []
    for name, size in (("words", 350), ("bytes", 259)):
        folders.append(str(tmp_path_factory.mktemp(name)))
        train_hf_tokenizer(vocab_size=size).save_pretrained(folders[-1])
    return folders


@pytest.fixture
def arguments(models, tmp_path):
    records = [{"text": "The fox\n"}, {"messages": CHAT}, {"prompt": "x", "completion": "The"}, {"text": "not shown"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["--align", "--input", str(tmp_path / "a.jsonl"), "--student", models[0], "--teacher", models[1]]


def test_every_kind_of_record(arguments, capsys):
    assert main(arguments) == EXIT_DONE
    first, chat, completion = capsys.readouterr().out.strip().split("\n\n")
    header, student, teacher = first.splitlines()
    assert header.endswith("a.jsonl:1: 4 student tokens, 8 teacher tokens, 4 chunks (1-1 2, 1-N 2, M-1 0, M-N 0)")
    assert student == "student |The| fo|x|\\n|" and teacher == "teacher |T+h+e| +f+o|x|\\n|"
    assert "|The|" in chat and "|<|im_end|>|" in chat and "(W)" in chat
    assert completion.splitlines()[1:] == ["student |(x)|The|", "teacher |(x)|T+h+e|"]


def test_colours_on_a_terminal_only(arguments, monkeypatch):
    def shown():
        leader, follower = pty.openpty()
        with open(follower, "w") as terminal, contextlib.redirect_stdout(terminal):
            assert main([*arguments, "--limit", "1"]) == EXIT_DONE
            terminal.flush()
            text = os.read(leader, 10_000).decode()
        os.close(leader)
        return text

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert f"{COLOURS[0]}The{RESET}|{COLOURS[1]} fo{RESET}" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in shown()


def test_it_runs_as_a_script(arguments):
    result = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == EXIT_DONE and "\033" not in result.stdout and "|The|" in result.stdout


def test_bytes_that_are_no_text_are_escaped():
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer())
    ids = np.array(tokenizer.encode("\u4f60"))
    aligned = AlignedText(ids, ids, np.array([[0, 1, 0, 1], [1, 3, 1, 3]]))
    assert view_alignment(aligned, tokenizer, tokenizer, colour=False).splitlines()[1] == r"student |\\xe4|\\xbd+\\xa0|"


def test_errors_name_the_record_and_what_to_do(arguments, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"texts": "x"}\n')
    arguments[2] = str(tmp_path / "bad.jsonl")
    assert main(arguments) == EXIT_DATA
    assert "bad.jsonl:2: " in capsys.readouterr().err
    assert main([*arguments, "--mode", "bytes"]) == EXIT_USAGE
    assert "use one of byte_offset, dp" in capsys.readouterr().err
