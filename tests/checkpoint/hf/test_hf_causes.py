"""One cause of many differences between weights and config.json is one problem that names it."""

from __future__ import annotations

import json
import shutil

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.errors import CheckpointError, ErrorList, UsageError
from mkd.plan.models.model_shape import ModelShape
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import refused, reports
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe")


def check(folder):
    check_hf_checkpoint(ModelShape.from_hf_dir(folder), HFCheckpoint(folder))


def renamed(source, folder, rename):
    """Copy the model with other names; a name that becomes None is left out."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    named = {rename(name): tensor for name, tensor in all_tensors(source).items()}
    save_file({name: tensor for name, tensor in named.items() if name}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (lambda n: n.removeprefix("model."), "lack the prefix 'model.'"),
        (lambda n: "module." + n, "have the prefix 'module.'"),
        (lambda n: "_orig_mod." + n, "have the prefix '_orig_mod.'"),
        (lambda n: "base_model.model." + n, "have the prefix 'base_model.model.'"),
        (
            lambda n: "module." + n.removeprefix("model."),
            "have the prefix 'module.' and lack the prefix 'model.'",
        ),
    ],
)
def test_a_prefix_is_one_problem_and_its_remedy_works(rename, says, llama, tmp_path):
    folder = renamed(llama, tmp_path / "model", rename)
    with refused("hf-tensor-prefix", CheckpointError) as caught:
        check(folder)
    assert says in caught.value.what
    file = folder / "model.safetensors"
    exec(
        caught.value.do.partition("rename the tensors: ")[2], {"safetensors": safetensors, "FILE": str(file)}
    )
    check(folder)
    assert load_file(file).keys() == all_tensors(llama).keys()


def test_a_model_saved_without_its_head_is_to_be_saved_again(llama, tmp_path):
    """AutoModel's save_pretrained: no prefix and no head; renaming would not be enough."""
    rename = {n: n.removeprefix("model.") for n in all_tensors(llama) if n.startswith("model.")}.get
    with refused("hf-tensor-prefix", CheckpointError) as caught:
        check(renamed(llama, tmp_path / "model", rename))
    assert "lm_head.weight is not there" in caught.value.why and "rename" not in caught.value.do


def test_shards_are_not_to_be_renamed(llama, tmp_path):
    """Their index has the names too, so that renamed shards could not be read."""
    folder = renamed(llama, tmp_path / "model", lambda name: "module." + name)
    file = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("hf-tensor-prefix", CheckpointError) as caught:
        check(folder)
    assert "save_pretrained" in caught.value.do and "rename" not in caught.value.do


def edit(source, folder, **keys):
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize(
    ("model", "keys", "says"),
    [
        ("experts", {"num_experts": 4}, ["4 experts (num_experts), the weights have 8"]),
        ("experts", {"num_experts": 12}, ["12 experts (num_experts), the weights have 8"]),
        ("llama", {"num_hidden_layers": 2}, ["2 layers (num_hidden_layers), the weights have 4"]),
        ("llama", {"num_hidden_layers": 6}, ["6 layers (num_hidden_layers), the weights have 4"]),
        ("llama", {"hidden_size": 56}, ["have 48 where config.json says 56 (hidden_size)"]),
        ("llama", {"intermediate_size": 128}, ["have 96 where config.json says 128 (intermediate_size)"]),
        (
            "llama",
            {"intermediate_size": 128, "num_hidden_layers": 5},
            ["5 layers (num_hidden_layers), the weights have 4", "where config.json says 128"],
        ),
        ("llama", {"vocab_size": 300}, ["have 307 where config.json says 300 (vocab_size)"]),
    ],
)
def test_a_number_of_config_json_is_one_problem(model, keys, says, tmp_path, request):
    folder = edit(request.getfixturevalue(model), tmp_path / "model", **keys)
    with pytest.raises((CheckpointError, ErrorList)) as caught:
        check(folder)
    found = getattr(caught.value, "errors", [caught.value])
    assert caught.value.exit_code == 66 and len(found) == len(says)
    for error, text in zip(found, says, strict=True):
        assert error.code == "hf-config-of-other-weights" and text in error.what, error.what


def test_weights_that_are_quantised_without_a_word(llama, tmp_path):
    """A folder of FP8 weights whose config.json comes from the original model."""
    shutil.copytree(llama, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {n: t.to(torch.float8_e4m3fn) if t.dim() == 2 else t for n, t in all_tensors(llama).items()}
    scales = {f"{n}_scale_inv": torch.ones(1, 1) for n, t in tensors.items() if t.dim() == 2}
    save_file(tensors | scales, tmp_path / "model" / "model.safetensors")
    with refused("hf-quantisation-not-supported: tensors are stored as", CheckpointError) as caught:
        check(tmp_path / "model")
    assert "30 tensors are stored as F8_E4M3" in caught.value.what


def test_single_differences_stay_problems_of_their_own(llama, tmp_path):
    gone = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    folder = renamed(llama, tmp_path / "model", lambda n: None if n in gone else n)
    with pytest.raises(ErrorList) as caught:
        check(folder)
    assert reports(caught.value) == ["hf-files-damaged: tensor"] * 2


@pytest.mark.parametrize("part", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "a.b"])
def test_a_part_inside_the_names_is_one_problem(part, llama, tmp_path):
    def rename(name):
        if part == "base_layer":
            return name.replace("q_proj.weight", "q_proj.base_layer.weight")
        return name.replace("layers.2.", f"layers.2.{part}.")

    folder = renamed(llama, tmp_path / "model", rename)
    with refused("hf-tensor-prefix: inside", CheckpointError) as caught:
        check(folder)
    layer, rest = ("0", "self_attn.q_proj") if part == "base_layer" else ("2", "input_layernorm")
    assert f"should be model.layers.{layer}.{rest}.weight" in caught.value.what and part in caught.value.what


def test_an_adapter_beside_a_model_is_not_left_out(llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        check(folder)  # one of the files alone is none
        (folder / name).write_text("{}")
    with refused("hf-adapter: holds a model, and beside it an adapter", CheckpointError):
        HFCheckpoint(folder)


def test_an_adapter_is_to_be_merged(llama, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    with refused("hf-adapter", CheckpointError) as caught:
        ModelShape.from_hf_dir(folder)
    assert "merge_and_unload" in caught.value.do
    shutil.copy(llama / "config.json", folder)
    with refused("hf-adapter", CheckpointError):
        HFCheckpoint(folder)
    beside = "model.layers.0.self_attn.q_proj.lora_A.weight"
    unmerged = renamed(llama, tmp_path / "m", lambda n: beside if n == "model.norm.weight" else n)
    with refused("hf-adapter", CheckpointError):
        check(unmerged)


@pytest.mark.parametrize(("model_type", "text"), [("llama4", "llama4_text"), ("qwen2_vl", "qwen2_vl_text")])
def test_no_hint_names_a_model_that_is_refused_too(model_type, text):
    config = {"model_type": model_type} | ({"text_config": {"model_type": text}} if text else {})
    with pytest.raises(UsageError) as caught:
        ModelShape.from_hf_config(config)
    assert "text model" not in caught.value.do
    nested = {"model_type": "new_vl", "text_config": {"model_type": "llama"}}
    with pytest.raises(UsageError) as caught:
        ModelShape.from_hf_config(nested)
    assert "its text model (llama), which this saves" in caught.value.do
