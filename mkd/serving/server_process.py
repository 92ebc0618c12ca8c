"""A server in a process of its own, which may have another Python than mkd."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mkd.errors import CheckpointError, UsageError

PROGRAMS = {"vllm": "vllm_program.py", "transformers": "transformers_program.py"}
MOST_LINES = 8  # of a failed server's output in the error
LOG_FILE = "server.log"
BESIDE_TORCH = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # PyPI's builds do not load with a CPU build of torch


@dataclass(frozen=True)
class Asked:
    """The question to a server."""

    model: str  # folder
    dtype: str  # bf16 or fp32
    ids: list[list[int]]  # of each prompt
    texts: list[str]  # to tokenise
    max_tokens: int
    max_length: int  # tokens of the longest prompt with its continuation
    gpu_share: float = 0.5  # of a GPU's memory, which mkd's own model shares


@dataclass(frozen=True)
class Answer:
    """Greedy continuations, in the order of the prompts."""

    version: str
    continuations: list[tuple[list[int], list[float]]]  # ids and their log-probabilities, nats
    tokenised: list[list[int]]


def has_vllm(python: str) -> bool:
    """Return True if this Python has vLLM. Raises UsageError if it cannot be started."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        what = f"--server-python {python} cannot be started: {error.strerror}"
        do = "name the python of the environment that has vLLM, such as vllm/bin/python"
        raise UsageError(what, "", do, code="path-not-found") from error


def ask(server: str, python: str | None, asked: Asked, timeout_s: float) -> Answer:
    """Start the server, wait for its answer and end it. Raises CheckpointError if there is none."""
    program = Path(__file__).with_name(PROGRAMS[server])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps(asdict(asked)), encoding="utf-8")
        command = [
            python or sys.executable,
            str(program),
            *(str(folder / f"{one}.json") for one in ("asked", "answer")),
        ]
        with open(folder / LOG_FILE, "wb") as log:
            try:
                # Not in mkd's folder, whose modules would hide those of the server's Python.
                done = subprocess.run(
                    command, stdout=log, stderr=log, cwd=name, timeout=timeout_s, check=False
                )
                ended = f"it ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"it had no answer after {timeout_s:g} s"
        try:
            content: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _no_answer(server, command[0], ended, folder / LOG_FILE) from error
    found = [(one["ids"], one["logprobs"]) for one in content["continuations"]]
    return Answer(content["version"], found, content["tokenised"])


def _no_answer(server: str, python: str, ended: str, log: Path) -> CheckpointError:
    """Return the error with the lines of the log that name a cause, else its last ones."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    causes = [line for line in lines if "Error" in line]
    shown = "\n       ".join((causes or lines)[:MOST_LINES])
    do = "repair the cause in that environment, or choose another server with --server"
    if any(name in shown for name in BESIDE_TORCH):
        do = f"their builds fit another torch, and text needs none: {python} -m pip uninstall " + " ".join(
            BESIDE_TORCH
        )
    return CheckpointError(
        f"{server} could not run the export: {ended}",
        shown or "it printed nothing",
        do,
        code="after-export-failed",
    )
