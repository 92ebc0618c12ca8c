"""The real tokenizers as fixtures."""

from __future__ import annotations

import subprocess

import pytest

from tests.tokenizers.trained import hf_dir, spm_file, tokenizer  # noqa: F401
from tests.xtoken.real_tokenizers import downloads_folder, fetch_tokenizers, load_real


@pytest.fixture(scope="session")
def tokenizer_paths(tmp_path_factory):
    """Return name -> path of Qwen3, SmolLM2, Mistral and GPT-2; tests that use it are marked `download`."""
    try:
        return fetch_tokenizers(downloads_folder(tmp_path_factory.getbasetemp() / "tokenizers"))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the tokenizers of Qwen3, SmolLM2, Mistral and GPT-2 could not be downloaded")


@pytest.fixture(scope="session")
def real_tokenizers(tokenizer_paths):
    """Return name -> Tokenizer of Qwen3, SmolLM2, Mistral and GPT-2."""
    return load_real(next(iter(tokenizer_paths.values())).parent)
