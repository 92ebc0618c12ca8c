"""Run the training command on the rank pool with tiny models and flags, and return what a user sees."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.fault_injection import fault
from tests.tiny_models import add_tokenizer, make_model

BATCH = 4
STUDENT = dict(family="qwen3", seed=1, num_hidden_layers=2, tie_word_embeddings=True)
TEACHER = dict(family="llama", seed=2, num_hidden_layers=3, hidden_size=72)


@dataclass(frozen=True)
class Result:
    """Result of one rank's command."""

    exit_code: int
    stdout: str
    stderr: str


def make_files(folder: Path) -> Path:
    """Make a student, a wider and deeper teacher with its tokenizer, and a text, below `folder`."""
    add_tokenizer(make_model(folder / "student", **STUDENT))
    add_tokenizer(make_model(folder / "teacher", **TEACHER))
    texts = [f"{i}: " + "the quick brown fox " * (i % 7 + 1) for i in range(60)]
    write_records(folder / "text.jsonl", *({"text": text} for text in texts))
    return folder


def write_records(path: Path, *records) -> Path:
    """Write JSON lines; a record that is a string is written unchanged."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def flags(files: Path, run: str, *more, **paths) -> list[str]:
    """Return the command line of a short run of `files`, logging to `run`. Without --save it saves nothing.

    `paths`, by flag, replace the default paths; None removes one.
    """
    own = {
        "student_hf": "student",
        "teacher_hf": "teacher",
        "data_path": "text.jsonl",
        "data_cache_path": "cache",
    }
    given = {name: path for name, path in (own | paths).items() if path is not None}
    words = [(f"--{name.replace('_', '-')}", files / path) for name, path in given.items()]
    words += [
        ("--log-dir", files / run),
        ("--seq-length", 32),
        ("--global-batch-size", BATCH),
        ("--train-iters", 2),
    ]
    words += [("--lr", 1e-3), *[(word,) for word in more]]
    words += [] if "--save" in more or "save" in given else [("--no-save",)]
    return [str(word) for pair in words for word in pair]


def run_main(ranks, argv: list[str], world_size: int = 1, command: str = "mkd.run.main") -> list[Result]:
    """Return results of the command, the `main` of a module, on every rank of a world."""
    return [Result(*values) for values in ranks.run(call_main, world_size, argv, command)]


def call_main(argv: list[str], command: str = "mkd.run.main") -> tuple[int, str, str]:
    """Run the command on this rank of the pool in torchrun's environment; return (exit code, stdout, stderr).

    A run that ends well leaves the process group; the pool wants to leave one too.
    """
    import torch.distributed as dist

    main = importlib.import_module(command).main
    rank = str(dist.get_rank())
    world = {"RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    world |= {} if "LOCAL_RANK" in os.environ else {"LOCAL_RANK": rank}  # GPU ranks already have one
    os.environ.update(world)
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            exit_code = main(argv)
    finally:
        for name in world:
            del os.environ[name]
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return exit_code, stdout.getvalue(), stderr.getvalue()


def with_fault(argv: list[str], text: str) -> tuple[int, str, str]:
    """Run `call_main` with the fault, on a rank of the pool."""
    with fault(text):
        return call_main(argv)


def poison(
    source: Path, folder: Path, value: float, tensor: str = "model.layers.1.mlp.down_proj.weight"
) -> Path:
    """Copy a model, with `value` in one element of one weight."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if tensor in tensors:
            tensors[tensor].view(-1)[7] = value
            save_file(tensors, path, metadata={"format": "pt"})
            return folder
    raise AssertionError(f"{source} has no tensor {tensor}")


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
