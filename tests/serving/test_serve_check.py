"""Serve exports in a process of its own (here transformers), and find what differs from mkd."""

from __future__ import annotations

import os

import pytest
import torch

from mkd.commands import serve_check
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.platform import detect
from mkd.serving.serve_check import TOLERANCES, Agreement, compare
from mkd.serving.served_prompts import prompts_of
from mkd.serving.server_process import Asked, ask
from tests.reported import refused, reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import run_main

VLLM_PYTHON = os.environ.get("MKD_VLLM_PYTHON")  # of an environment with vLLM
COMMAND = serve_check.__name__


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return two models of one family with the same tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    return [add_tokenizer(make_model(folder / str(seed), "qwen3", seed=seed)) for seed in (0, 1)]


def compared(models):
    """Serve the first model and compare its text with both, on a rank of the pool."""
    shape, context = ModelShape.from_hf_dir(models[0]), ParallelContext.create(detect())
    prompts = prompts_of(models[0], shape.vocab_size)
    answer = ask("transformers", None, Asked(str(models[0]), "fp32", prompts.ids, prompts.texts, 8, 64), 120)
    return [compare(model, shape, context, prompts, answer, "fp32") for model in models]


def test_a_server_of_the_model_agrees_and_one_of_other_weights_does_not(models, ranks):
    """transformers' greedy text, by its key-value cache, has the log-probabilities of mkd's packs."""
    ((same, other),) = ranks.run(compared, 1, models)
    assert same.num_tokens == 32 and same.num_best >= 31 and not [*same.problems(TOLERANCES["fp32"])]
    assert same.largest < 1e-5
    assert len([*other.problems(TOLERANCES["fp32"])]) == 2 and not other.wrong_texts


def test_the_exit_code_tells(models, ranks, tmp_path):
    words = [str(models[0]), "--server", "transformers", "--max-new-tokens", "4", "--tolerance"]
    (passed,) = run_main(ranks, [*words, "1e-3"], command=COMMAND)
    assert passed.exit_code == 0 and passed.stdout.endswith("agreed\n"), passed.stderr
    (failed,) = run_main(ranks, [*words, "1e-15"], command=COMMAND)
    assert failed.exit_code == 66
    assert reported_codes(failed.stderr) == ["parity-beyond-tolerance: log-probabilities differ by up to"]


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="needs vLLM: MKD_VLLM_PYTHON=PYTHON of its environment")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_vllm_agrees(dtype, tmp_path, ranks):
    model = make_model(tmp_path / "model", "qwen3", hidden_size=128, head_dim=32)
    words = [add_tokenizer(model), "--server-python", VLLM_PYTHON, "--dtype", dtype, "--max-new-tokens", 8]
    (done,) = run_main(ranks, [*map(str, words)], command=COMMAND)
    assert done.exit_code == 0 and "server          vLLM" in done.stdout, done


def test_what_is_beyond_the_tolerance():
    good = dict(version="v", dtype="fp32", num_tokens=8, largest=1e-4, mean=1e-5, regret=1e-4, num_best=7)
    assert not [*Agreement(**good, wrong_texts=()).problems(1e-3)]
    for changed in (
        dict(largest=0.1),
        dict(largest=float("nan")),
        dict(regret=0.1),
        dict(wrong_texts=("a",)),
    ):
        assert len([*Agreement(**(good | dict(wrong_texts=()) | changed)).problems(1e-3)]) == 1


def test_a_server_that_cannot_run(tmp_path):
    asked = Asked(str(tmp_path), "fp32", [[1]], [], 1, 2)
    with refused("after-export-failed: ended with 1"):
        ask("transformers", None, asked, 120)
    with refused("after-export-failed: had no answer after 0.01 s"):
        ask("transformers", None, asked, 0.01)


def test_packages_that_fit_another_torch(tmp_path):
    """vLLM imports torchvision, of which PyPI has builds for CUDA alone."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho RuntimeError: operator torchvision::nms does not exist; exit 1\n")
    python.chmod(0o755)
    with refused("after-export-failed: ended with 1") as caught:
        ask("vllm", str(python), Asked(str(tmp_path), "fp32", [[1]], [], 1, 2), 120)
    assert caught.value.do.endswith(f"{python} -m pip uninstall torchvision torchaudio torchcodec")


def test_prompts_without_a_tokenizer_are_random_ids(tmp_path):
    prompts = prompts_of(tmp_path, 300)
    assert torch.tensor(prompts.ids).shape == (4, 12) and not prompts.texts
    (tmp_path / "prompts.txt").write_text("a\n")
    with refused("remove-flag: has no tokenizer"):
        prompts_of(tmp_path, 300, tmp_path / "prompts.txt")
