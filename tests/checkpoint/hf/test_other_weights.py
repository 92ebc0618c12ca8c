"""Files of weights whose first bytes show that they are something else."""

from __future__ import annotations

import pytest

from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.errors import CheckpointError, MkdError
from tests.reported import refused
from tests.tiny_models import make_model


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "model", "llama")


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS"),
        (b"\n<!DOCTYPE html><html>", "is a page of HTML"),
        (b"GGUF\3\0", "is a GGUF file"),
    ],
)
def test_other_content_than_the_name_says(folder, start, says):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(start)
    with refused("hf-files-damaged: weights are read from safetensors", CheckpointError) as caught:
        HFCheckpoint(folder)
    assert says in caught.value.what and "files of weights" in caught.value.what
    last = max(folder.glob("*.safetensors"))
    for path in set(folder.glob("*.safetensors")) - {last}:
        path.unlink()
    with pytest.raises(MkdError) as others:
        HFCheckpoint(folder)
    assert f"{last} {says}" in str(others.value) and "is missing" in str(others.value)
