"""Read Hugging Face folders: what is read, how much of it, and every folder that must be refused."""

from __future__ import annotations

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_folder import PLANNED
from mkd.checkpoint.hf.hf_hub import config_folder, resolve_hf
from mkd.checkpoint.hf.hf_reader import INDEX_FILE, TRUSTED_FOLDERS, HFCheckpoint
from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.errors import CheckpointError, ErrorList, MkdError
from mkd.models.builder import build_model_parts
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import Reported, refused, reports
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def folder(original, tmp_path):
    """Return a private copy of a sharded checkpoint, to damage."""
    return shutil.copytree(original, tmp_path / "model")


def edit_index(folder, **entries):
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"].update(entries)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def edit_tensor(folder, name, change):
    """Apply `change` to the dictionary of the file that holds `name`."""
    file = folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _header(**tensor):
    """Return the beginning of a safetensors file with one tensor."""
    text = json.dumps({"a": tensor}).encode()
    return struct.pack("<Q", len(text)) + text


def problems_of(folder):
    shape = ModelShape.from_hf_dir(folder)
    with pytest.raises(MkdError) as caught:
        check_hf_checkpoint(shape, HFCheckpoint(folder))
    assert caught.value.exit_code == 66
    return caught.value.errors if isinstance(caught.value, ErrorList) else [caught.value]


def test_slices_are_those_of_the_whole_tensors_and_are_counted(folder):
    checkpoint, tensors = HFCheckpoint(folder), all_tensors(folder)
    assert len(set(header.file for header in checkpoint.headers.values())) > 2
    assert checkpoint.headers.keys() == tensors.keys() and checkpoint.bytes_read == 0
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(checkpoint.read(name, (slice(5, 12), slice(None))), tensors[name][5:12])
    assert checkpoint.bytes_read == 7 * 96 * 4
    assert torch.equal(checkpoint.read(name, (slice(None), slice(30, 32))), tensors[name][:, 30:32])
    assert checkpoint.bytes_read == 7 * 96 * 4 + 48 * 2 * 4
    assert torch.equal(
        checkpoint.read("model.norm.weight", (slice(1, 4),)), tensors["model.norm.weight"][1:4]
    )


@pytest.mark.parametrize(
    "value",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "a\0.safetensors",
        7,
        None,
        ["x"],
    ],
)
@pytest.mark.fault(31)
def test_weight_map_may_only_name_files_of_the_folder(folder, value):
    edit_index(folder, **{"model.norm.weight": value})
    with refused("untrusted-files: weight_map sends tensor", CheckpointError) as caught:
        HFCheckpoint(folder)
    assert "model.norm.weight" in caught.value.what and repr(value) in caught.value.what


def test_all_unsafe_entries_are_reported_at_once(folder):
    edit_index(folder, **{"model.norm.weight": "../a.safetensors", "lm_head.weight": "/b.safetensors"})
    with pytest.raises(ErrorList) as caught:
        HFCheckpoint(folder)
    assert (
        reports(caught.value) == ["untrusted-files: weight_map sends tensor"] * 2
        and caught.value.exit_code == 66
    )


@pytest.mark.fault(31)
def test_links_may_not_leave_the_model(folder, tmp_path):
    shard = next(folder.glob("model-*.safetensors"))
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with refused("hf-link-outside-folder", CheckpointError) as caught:
        HFCheckpoint(folder)
    assert shard.name in caught.value.what


def test_links_may_lead_into_folders_that_the_user_trusts(folder, tmp_path, monkeypatch):
    store, private = tmp_path / "store" / "deep", tmp_path / "store of another"
    store.mkdir(parents=True)
    private.mkdir()
    shape = ModelShape.from_hf_dir(folder)
    for shard in folder.glob("model-*.safetensors"):
        shard.rename(store / shard.name)
        shard.symlink_to(store / shard.name)
    with pytest.raises(ErrorList) as caught:
        HFCheckpoint(folder)
    assert all(f"{TRUSTED_FOLDERS}={store} " in one.do for one in caught.value.errors)
    monkeypatch.setenv(TRUSTED_FOLDERS, f"/nowhere:{store.parent}")
    check_hf_checkpoint(shape, HFCheckpoint(folder))
    shard.unlink()
    (store / shard.name).rename(private / shard.name)
    shard.symlink_to(private / shard.name)
    with refused("hf-link-outside-folder", CheckpointError):
        HFCheckpoint(folder)


def test_links_in_a_circle(folder):
    shard = next(folder.glob("model-*.safetensors"))
    shard.unlink()
    shard.symlink_to(shard)
    with refused("hf-files-damaged: cannot be opened", CheckpointError):
        HFCheckpoint(folder)


@pytest.mark.fault(31)
def test_links_of_a_hub_cache_are_followed(original, tmp_path):
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(original.iterdir())):
        shutil.copyfile(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    check_hf_checkpoint(ModelShape.from_hf_dir(snapshot), HFCheckpoint(snapshot))
    outside = tmp_path / "models--org--other.safetensors"
    outside.write_bytes(b"")
    link = snapshot / sorted(snapshot.glob("model-*.safetensors"))[0].name
    link.unlink()
    link.symlink_to(outside)
    with refused("hf-link-outside-folder", CheckpointError):
        HFCheckpoint(snapshot)


@pytest.mark.fault(30)
def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with refused("hf-not-safetensors", CheckpointError):
        HFCheckpoint(tmp_path)


def test_a_student_that_is_still_to_be_cut(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({PLANNED: True}))
    with refused("hf-weights-missing", CheckpointError) as caught:
        HFCheckpoint(tmp_path)
    assert "mkd make-student" in caught.value.do


def test_folder_without_weights(tmp_path):
    with refused("hf-weights-missing: holds neither", CheckpointError):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '"x"'])
def test_malformed_index(folder, text):
    (folder / INDEX_FILE).write_text(text)
    with refused(
        "hf-files-damaged: lists no tensors"
        if text == '{"weight_map": {}}'
        else "hf-files-damaged: is not an index of safetensors",
        CheckpointError,
    ):
        HFCheckpoint(folder)


@pytest.mark.fault(31)
def test_missing_shards_are_named(folder):
    for number in (1, 2):
        next(folder.glob(f"model-0000{number}-of-*")).unlink()
    with pytest.raises(ErrorList) as caught:
        HFCheckpoint(folder)
    assert reports(caught.value) == ["hf-files-damaged: .safetensors"] * 2
    assert [f"model-0000{n}-of-" in caught.value.errors[n - 1].what for n in (1, 2)] == [True] * 2


@pytest.mark.fault(31)
def test_truncated_shard_is_named(folder):
    shard = next(folder.glob("model-00002-of-*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with refused("hf-files-damaged: cannot be opened", CheckpointError) as caught:
        HFCheckpoint(folder)
    assert shard.name in caught.value.what


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,  # a header of 2**64 bytes
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": 1}}',
        _header(dtype="F32", shape=[1 << 40, 1 << 40], data_offsets=[0, 8]),
        _header(dtype="F32", shape=[2], data_offsets=[0, 1 << 62]),
        _header(dtype="F32", shape=[2], data_offsets=[8, 0]),
        _header(dtype="F32", shape=[-2], data_offsets=[0, 8]),
        _header(dtype="F99", shape=[2], data_offsets=[0, 8]),
    ],
)
@pytest.mark.fault(31)
def test_absurd_header_is_refused(header, folder):
    shard = next(folder.glob("model-00002-of-*"))
    shard.write_bytes(header + bytes(8))
    with refused("hf-files-damaged: cannot be opened", CheckpointError):
        HFCheckpoint(folder)


def test_index_that_names_a_tensor_its_shard_lacks(folder):
    edit_index(folder, **{"model.layers.9.mlp.up_proj.weight": next(folder.glob("model-00001-of-*")).name})
    with refused("hf-files-damaged: has no tensor", CheckpointError):
        HFCheckpoint(folder)


def test_no_tensor_of_a_shard_is_left_out(folder):
    """An index of another save: a tensor that it does not list, and one that is in two files."""
    norm, up = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    edit_tensor(folder, norm, lambda tensors: tensors.update({"model.more.weight": torch.ones(2)}))
    edit_tensor(folder, norm, lambda tensors: tensors.update({up: torch.ones(96, 48)}))
    with pytest.raises(ErrorList) as caught:
        HFCheckpoint(folder)
    assert reports(caught.value) == ["hf-files-damaged: has tensor"] * 2
    assert f"{up}, and {INDEX_FILE} lists it in" in str(caught.value)


@pytest.mark.fault(31)
def test_every_mismatch_is_reported_before_anything_is_read(folder):
    name, more = "model.layers.0.mlp.up_proj.weight", "model.layers.1.more.weight"
    edit_tensor(folder, name, lambda tensors: tensors.update({name: torch.ones(95, 48)}))
    edit_tensor(folder, "model.norm.weight", lambda tensors: tensors.update({more: torch.ones(2)}))
    index = json.loads((folder / INDEX_FILE).read_text())
    edit_index(folder, **{more: index["weight_map"]["model.norm.weight"]})
    problems = problems_of(folder)
    assert reports(problems) == ["hf-tensor-unexpected: has shape", "hf-tensor-unexpected: is not expected"]
    assert problems[0].what == f"{folder}: tensor {name} has shape [95, 48], expected [96, 48]"
    assert all(p.why and p.do for p in problems)


@pytest.mark.fault(31)
def test_missing_tensor(folder):
    name = "model.layers.3.self_attn.k_proj.weight"
    edit_tensor(folder, name, lambda tensors: tensors.pop(name))
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"][name]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (problem,) = problems_of(folder)
    assert problem.code == "hf-files-damaged" and "layers.3.self_attn.k_proj.weight" in problem.what


def test_quantised_tensor(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensor(folder, name, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    (problem,) = problems_of(folder)
    assert problem.code == "hf-quantisation-not-supported" and name in problem.what


def test_stored_rotary_frequencies_are_ignored(folder):
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensor(folder, "model.norm.weight", lambda tensors: tensors.update({extra: torch.ones(4)}))
    index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    edit_index(folder, **{extra: index["model.norm.weight"]})
    check_hf_checkpoint(ModelShape.from_hf_dir(folder), HFCheckpoint(folder))


def test_what_this_user_may_not_read_is_named(tmp_path, monkeypatch):
    """Permissions of real files would not bind the root user, as whom tests may run."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "notes.json").symlink_to(tmp_path / "notes.json")  # a circle is no file of a model
    for locked in (tmp_path, tmp_path / "config.json", tmp_path / "model.safetensors"):
        monkeypatch.setattr(os, "access", lambda path, mode, locked=locked: path != locked)
        for resolve in (resolve_hf, config_folder):
            with refused("inputs-unreadable", CheckpointError) as caught:
                resolve(tmp_path)
            assert caught.value.what == f"{locked}: permission denied"


def test_a_local_folder_resolves_to_itself(folder):
    assert resolve_hf(str(folder)) == folder


@pytest.mark.parametrize("source", ["no/such/folder/here", "/no/such/folder"])
def test_neither_folder_nor_hub_id(source):
    with refused("hf-model-not-found", CheckpointError):
        resolve_hf(source)


def load(folder, tp, dtype=torch.float32, change=None):
    """Return the bytes that this rank read and its parameters, or the code of the error."""
    context = ParallelContext.create(detect(), Sizes(tensor=tp))
    shape = ModelShape.from_hf_dir(folder)
    layout = PipelineLayout.even(shape.num_layers, 1)
    (chunk,) = build_model_parts(shape, layout, ModelOptions(dtype=dtype), context)
    checkpoint = HFCheckpoint(folder)
    for parameter in chunk.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # parameters that are not written stay NaN
    if change == "extra parameter":
        chunk.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    if change == "no norm":
        chunk.decoder.layers[1].input_layernorm = torch.nn.Identity()
    try:
        load_hf_weights(chunk, shape, checkpoint, context)
    except MkdError as error:
        return checkpoint.bytes_read, Reported.of(error)
    return checkpoint.bytes_read, {name: parameter.detach() for name, parameter in chunk.named_parameters()}


def test_each_of_two_ranks_reads_about_half(ranks, folder):
    total = sum(tensor.numel() * tensor.element_size() for tensor in all_tensors(folder).values())
    ((alone, _),) = ranks.run(load, 1, folder, 1)
    assert alone == total
    shares = [read / total for read, _ in ranks.run(load, 2, folder, 2)]
    # both ranks read norms; rank 0 has 256 of the 307 vocabulary rows and 2 of the 3 attention groups
    assert 1.0 < sum(shares) < 1.01 and max(shares) < 0.76
    assert min(shares) > 0.25


def test_padding_is_zero_and_nothing_is_left_unwritten(ranks, folder):
    (_, first), (_, second) = ranks.run(load, 2, folder, 2)
    for parameters in (first, second):
        assert all(parameter.isfinite().all() for parameter in parameters.values())
    group, width = (2 + 2) * 8, 2 * 8  # rows of a query/key/value group, columns of its two heads
    attention = "decoder.layers.0.self_attention."
    assert second[attention + "linear_qkv.weight"][:group].abs().min() > 0
    assert second[attention + "linear_qkv.weight"][group:].abs().max() == 0
    assert second[attention + "linear_proj.weight"][:, :width].abs().min() > 0
    assert second[attention + "linear_proj.weight"][:, width:].abs().max() == 0
    assert second["output_layer.weight"][307 - 256 :].abs().max() == 0


def test_weights_arrive_in_the_models_dtype(ranks, folder):
    tensors = all_tensors(folder)
    ((_, parameters),) = ranks.run(load, 1, folder, 1, torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(parameters["decoder.layers.1.mlp.linear_fc2.weight"], tensors[name].bfloat16())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert parameters["embedding.word_embeddings.weight"][307:].abs().max() == 0


def test_parameter_without_source_is_an_error(ranks, folder):
    ((read, code),) = ranks.run(load, 1, folder, 1, torch.float32, "extra parameter")
    assert (read, code) == (0, "hf-tensor-unexpected: has no source in a")


def test_tensor_without_parameter_is_an_error(ranks, folder):
    ((read, code),) = ranks.run(load, 1, folder, 1, torch.float32, "no norm")
    assert (read, code) == (0, "hf-tensor-unexpected: the model has no parameter for")


@pytest.mark.parametrize("equal", [True, False])
def test_stored_head_of_a_tied_model_must_equal_the_embedding(ranks, tmp_path, equal):
    tensors = all_tensors(make_model(tmp_path, "qwen2"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not equal:
        tensors["lm_head.weight"][306, 47] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    ((_, result),) = ranks.run(load, 1, tmp_path, 1)
    if equal:
        assert torch.equal(result["embedding.word_embeddings.weight"][:307], tensors["lm_head.weight"])
    else:
        assert result == "hf-tensor-unexpected: differs from"
