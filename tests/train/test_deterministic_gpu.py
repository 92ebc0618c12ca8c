"""Check that --deterministic-mode runs on one GPU write the same student, resumed or not, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY
from tests.tiny_models import add_tokenizer, make_model

pytestmark = pytest.mark.gpu


STEPS = 5
MORE = ("--use-distributed-optimizer",)


def train(folder, name, *more) -> bytes:
    """Return the exported weights of a short run."""
    argv = [
        "--student-hf",
        folder / "student",
        "--teacher-hf",
        folder / "teacher",
        "--data-path",
        folder / "text.jsonl",
    ]
    argv += ["--train-iters", STEPS, "--seq-length", 512, "--global-batch-size", 4, "--bf16", "--lr", "1e-3"]
    argv += ["--deterministic-mode", "--export-hf", folder / name, "--log-dir", folder / f"log_{name}"]
    argv += ["--data-cache-path", folder / "cache", *more]
    return weights("pretrain_kd.py", argv, folder / name, LOCAL_RANK="0")


def weights(script, argv, written, **environment) -> bytes:
    """Return the weights that `script` writes into a folder."""
    run(script, argv, **environment)
    return b"".join(path.read_bytes() for path in sorted(written.glob("*.safetensors")))


def run(script, argv, **environment) -> str:
    """Return the output of `script`."""
    command = [sys.executable, script, *map(str, argv)]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deterministic")
    sizes = dict(
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, hidden_size=512, intermediate_size=1024
    )
    student = make_model(folder / "student", "qwen3", seed=1, tie_word_embeddings=True, **sizes)
    teacher = make_model(folder / "teacher", "qwen3", seed=2, **sizes | dict(num_hidden_layers=8))
    for model in (student, teacher):
        add_tokenizer(model)
    lines = [f'{{"text": "{" ".join(str(i * j % 97) for j in range(50 + i))}"}}' for i in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def exported(folder):
    """Return the weights of a run that has also saved a checkpoint."""
    return train(folder, "whole", *MORE, "--save", folder / "saved whole")


def test_same_bits(folder, exported):
    assert train(folder, "again", *MORE) == exported


def test_same_bits_without_cuda_graphs(folder, exported):
    assert train(folder, "eager", *MORE, "--cuda-graphs", "off") == exported


def test_same_bits_after_a_resume_with_graphs_of_a_run_without(folder, exported):
    in_parts = (*MORE, "--save", folder / "saved parts")
    train(folder, "parts", *in_parts, "--exit-interval", STEPS // 2, "--cuda-graphs", "off")
    assert train(folder, "parts", *in_parts, "--load", folder / "saved parts") == exported


def test_same_bits_after_a_resume(folder, exported):
    in_halves = (*MORE, "--async-save", "--save", folder / "saved halves")
    train(folder, "halves", *in_halves, "--exit-interval", STEPS // 2)
    assert train(folder, "halves", *in_halves, "--load", in_halves[-1]) == exported


def test_without_a_gpu_the_checkpoint_becomes_the_same_export(folder, exported):
    argv = ["--load", folder / "saved whole", "--hf-out", folder / "converted"]
    assert (
        weights("tools/convert_mcore_to_hf.py", argv, folder / "converted", CUDA_VISIBLE_DEVICES="")
        == exported
    )


def test_the_checkpoint_and_its_export_are_the_same_function_in_fp32(folder, exported):
    """This includes Transformer Engine, whose products of fp32 matrices would be TF32."""
    assert "top-1 agreement" in run(
        "tools/check_parity.py", ["--load", folder / "saved whole", "--hf", folder / "whole"]
    )
