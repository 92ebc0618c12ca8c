"""Two runs of the command with --deterministic-mode on one GPU write the same student, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY
from tests.tiny_models import add_tokenizer, make_model

pytestmark = pytest.mark.gpu


def train(folder, name) -> bytes:
    """The exported weights of a short run."""
    argv = ["--student-hf", folder / "student", "--teacher-hf", folder / "teacher", "--data-path", folder / "text.jsonl"]
    argv += ["--train-iters", 5, "--seq-length", 512, "--global-batch-size", 4, "--bf16", "--lr", "1e-3"]
    argv += ["--deterministic-mode", "--export-hf", folder / name, "--log-dir", folder / f"log_{name}"]
    argv += ["--data-cache-path", folder / "cache"]
    command = [sys.executable, "pretrain_kd.py", *map(str, argv)]
    result = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"LOCAL_RANK": "0"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return b"".join(path.read_bytes() for path in sorted((folder / name).glob("*.safetensors")))


def test_same_bits(tmp_path):
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, hidden_size=512, intermediate_size=1024)
    student = make_model(tmp_path / "student", "qwen3", seed=1, tie_word_embeddings=True, **sizes)
    teacher = make_model(tmp_path / "teacher", "qwen3", seed=2, **sizes | dict(num_hidden_layers=8))
    for folder in (student, teacher):
        add_tokenizer(folder)
    lines = [f'{{"text": "{" ".join(str(i * j % 97) for j in range(50 + i))}"}}' for i in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert train(tmp_path, "first") == train(tmp_path, "second")
