"""A chat in a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time

import pytest
from transformers import AutoTokenizer

from tests.chat.small_pair import NEW_TOKENS, generated, make_chat_model, run_command
from tests.ranks import REPOSITORY

ENDS = ["<|endoftext|>", "<|im_end|>"]
WAIT_S = 120


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_chat_model(folder / "student", num_hidden_layers=2, max_position_embeddings=300)
    make_chat_model(folder / "teacher", "qwen3", seed=1, max_position_embeddings=60000)
    return folder


def replies(stdout: str, role: str) -> list[str]:
    """Return the answers of a model in a transcript."""
    found = re.findall(rf"^{role}> (.*?)(?=\n(?:you|student|teacher)> |\n\[|\Z)", stdout, re.M | re.S)
    return [one.removesuffix("\n") for one in found]


def expected_replies(folder, said: list[str]) -> list[str]:
    """Return the greedy answers of transformers, each after those before it."""
    tokenizer, messages = AutoTokenizer.from_pretrained(folder), []
    for text in said:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        (answer,) = generated(folder, [ids], ENDS)
        answer = answer[:-1] if tokenizer.convert_ids_to_tokens(answer[-1]) in ENDS else answer
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
    return [one["content"].removesuffix("\n") for one in messages[1::2]]


def test_each_model_answers_after_its_own_answers(pair, ranks):
    """A full context is said, and /new makes room."""
    said = ["A model predicts", "What next?"]
    typed = "\n".join([*said, "x " * 400, "/new", said[0], "/retry", "/nonsense", "/exit", "never read"])
    argv = [pair / "student", "--teacher", pair / "teacher", "--temperature", "0"]
    ((code, stdout, stderr),) = ranks.run(
        run_command, 1, "chat", [*argv, "--max-new-tokens", NEW_TOKENS], typed + "\n"
    )
    assert code == 0, stderr
    for role in ("student", "teacher"):
        expected = expected_replies(pair / role, said)
        assert replies(stdout, role) == [*expected, expected[0], expected[0]]
    assert "error[longer-than-seq-length]: the prompt has" in stdout and "/new" in stdout
    assert "/nonsense is not a command" in stdout and "never read" not in stdout


class Terminal:
    """A program on a pseudo-terminal of 24 rows and 80 columns."""

    def __init__(self, argv: list):
        command = [sys.executable, "-m", "mkd", *map(str, argv)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        environment |= {"COLUMNS": "80", "LINES": "24", "CUDA_VISIBLE_DEVICES": ""}
        self.pid, self._file = pty.fork()
        if not self.pid:
            os.execve(sys.executable, command, environment)
        self.text = ""

    def wait_for(self, pattern: str, start: int = 0) -> int:
        """Read until the pattern is found behind `start`; return the end of it."""
        deadline = time.monotonic() + WAIT_S
        while not (found := re.compile(pattern).search(self.text, start)):
            ready, _, _ = select.select([self._file], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.text
            try:
                self.text += os.read(self._file, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(self.text) from None
        return found.end()

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def end(self) -> int:
        """Return the exit code."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.slow  # the teacher must still write when Ctrl-C comes, which depends on the machine and the seed
def test_two_columns_and_ctrl_c_on_a_terminal(pair):
    """The student stops where its context is full, the teacher at Ctrl-C; twice Ctrl-C leaves."""
    flags = ["--teacher", pair / "teacher", "--temperature", "1.5", "--max-new-tokens", "50000"]
    terminal = Terminal(["chat", pair / "student", *flags])
    place = terminal.wait_for("you> ")
    terminal.type("Questions\r")
    place = terminal.wait_for(r"student\S* +\| .*teacher", place)
    time.sleep(2)
    terminal.type("\x03")
    place = terminal.wait_for(r"teacher: interrupted", place)
    place = terminal.wait_for("you> ", place)
    terminal.type("half a message\x03")
    place = terminal.wait_for("press Ctrl-C again", place)
    place = terminal.wait_for("you> ", place)
    terminal.type("\x03")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.text
