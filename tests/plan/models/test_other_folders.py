"""A folder that is no model is told for what it is, with the way to a model."""

from __future__ import annotations

import pytest

from mkd.errors import CheckpointError
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["m-Q4_K_M.gguf"], "llama.cpp"),
        (["zero_to_fp32.py", "latest"], "DeepSpeed"),
        (["__0_0.distcp", ".metadata"], "FSDP"),
        (["latest_checkpointed_iteration.txt"], "Megatron"),
        (["consolidated.safetensors", "params.json"], "Mistral"),
        (["consolidated.00.pth"], "Meta"),
        (["weights.safetensors"], "weights.safetensors alone"),
        (["README.md"], "a Hugging Face model folder holds"),
    ],
)
def test_what_it_holds(files, says, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    with refused("hf-weights-missing", CheckpointError) as caught:
        ModelShape.from_hf_dir(tmp_path)
    assert says in caught.value.why and caught.value.do


@pytest.mark.parametrize("inside", ["checkpoint-", "snapshots/"])
def test_models_in_folders_of_it_are_named(inside, tmp_path):
    for number in (500, 1000):
        folder = tmp_path / f"{inside}{number}"
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/config.json").touch()
    with refused("hf-weights-missing", CheckpointError) as caught:
        ModelShape.from_hf_dir(tmp_path)
    assert caught.value.do == f"name one of them: {tmp_path}/{inside}1000"
    assert "1000 and 1 more" in caught.value.why


def test_a_pointer_instead_of_config_json(tmp_path):
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with refused("model-config-not-valid: a pointer of Git LFS", CheckpointError):
        ModelShape.from_hf_dir(tmp_path)
