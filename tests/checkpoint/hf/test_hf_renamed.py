"""Tensors under other names are one problem, which says which look like which."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
from safetensors.torch import load_file

from mkd.errors import CheckpointError
from tests.checkpoint.hf.test_hf_causes import check, renamed
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import refused
from tests.tiny_models import make_model

LAYER = "model.layers.N."


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe")


def replacing(*pairs):
    def rename(name):
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return rename


CASES = {
    "attn": (
        "llama",
        [(".self_attn.", ".attn.")],
        16,
        [f"{LAYER}attn.q_proj.weight looks like {LAYER}self_attn.q_proj.weight"],
    ),
    "several parts": (
        "llama",
        [(".mlp.", ".ffn."), ("model.norm.", "model.final_norm.")],
        13,
        ["model.final_norm.weight looks like model.norm.weight"],
    ),
    "a form of its own": (
        "llama",
        [(".mlp.down_proj.", ".mlp.w2.")],
        4,
        [f"{LAYER}mlp.w2.weight looks like {LAYER}mlp.down_proj.weight"],
    ),
    "experts": (
        "experts",
        [(".experts.", ".local_experts.")],
        72,
        [f"{LAYER}mlp.local_experts.N.up_proj.weight looks like {LAYER}mlp.experts.N.up_proj.weight"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_names_and_the_remedy(case, tmp_path, request):
    """The Python of the error makes the folder the model again."""
    model, pairs, count, says = CASES[case]
    source = request.getfixturevalue(model)
    folder = renamed(source, tmp_path / "model", replacing(*pairs))
    with refused("hf-tensor-prefix: tensors have other names", CheckpointError) as caught:
        check(folder)
    assert f": {count} tensors" in caught.value.what
    assert all(text in caught.value.what for text in says), caught.value.what
    file = folder / "model.safetensors"
    code = caught.value.do.partition("names differs: ")[2]
    exec(code, {"safetensors": safetensors, "FILE": str(file)})
    check(folder)
    assert load_file(file).keys() == all_tensors(source).keys()


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (
            [(".mlp.gate_proj.", ".mlp.w1."), (".mlp.up_proj.", ".mlp.w3."), (".mlp.down_proj.", ".mlp.w2.")],
            f"{LAYER}mlp.w1.weight and {LAYER}mlp.w3.weight could be "
            f"{LAYER}mlp.gate_proj.weight or {LAYER}mlp.up_proj.weight",
        ),
        (
            [(".input_layernorm.", ".attention_norm."), (".post_attention_layernorm.", ".ffn_norm.")],
            f"{LAYER}attention_norm.weight and {LAYER}ffn_norm.weight could be "
            f"{LAYER}input_layernorm.weight or {LAYER}post_attention_layernorm.weight",
        ),
    ],
)
def test_shapes_that_fit_several_names_are_not_guessed(pairs, says, llama, tmp_path):
    """The norm before attention is called more like the one behind it."""
    with refused("hf-tensor-prefix", CheckpointError) as caught:
        check(renamed(llama, tmp_path / "model", replacing(*pairs)))
    assert says in caught.value.what, caught.value.what
    assert "safetensors" not in caught.value.do  # renaming what is known would not be enough


def test_weights_of_another_program_are_one_problem(llama, tmp_path):
    """No name and no shape is one that config.json calls for."""
    folder = renamed(llama, tmp_path / "model", lambda name: "w" + name[::-1].replace(".", "_"))
    tensors = {name: tensor[None, None] for name, tensor in load_file(folder / "model.safetensors").items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with refused("hf-tensor-prefix: tensors are missing", CheckpointError) as caught:
        check(folder)
    assert "whose family is llama" in caught.value.why


def test_shards_are_to_be_saved_again(llama, tmp_path):
    folder = renamed(llama, tmp_path / "model", replacing((".self_attn.", ".attn.")))
    file = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("hf-tensor-prefix", CheckpointError) as caught:
        check(folder)
    assert "save_pretrained" in caught.value.do and "save_file" not in caught.value.do
