"""Write Hugging Face folders: bitwise round trips through every layout, and replacing an export safely."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_reader import INDEX_FILE, HFCheckpoint
from mkd.checkpoint.hf.hf_shards import export_plan
from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.errors import MkdError, UsageError
from mkd.models.builder import build_model_parts
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import refused
from tests.tiny_models import DENSE, make_model

LAYOUTS = {  # world size, (tensor parallel, layers of each stage, virtual stages)
    "tp1": (1, (1, (4,), 1)),
    "tp2": (2, (2, (4,), 1)),
    "pp2_uneven": (2, (1, (3, 1), 1)),
    "tp2_pp2": (4, (2, (2, 2), 1)),
}
MORE_LAYOUTS = {
    "tp4": (4, (4, (4,), 1)),
    "pp2_vpp2": (2, (1, (1, 1, 1, 1), 2)),
    "dp2": (2, (1, (4,), 1)),
    "pp2_dp2": (4, (1, (2, 2), 1)),
}


def import_export(
    source,
    out,
    layout,
    dtype=None,
    max_shard_bytes=60_000,
    more_vocabulary=0,
    file_limit=None,
    drop="",
    assets=None,
):
    """Load `source` and export it to `out`; return the text of the error, or None.

    `assets` are the configuration and tokenizer to write (default: those of `source`).
    """
    assets = assets or HFAssets.of(source)
    tp, stages, virtual = layout
    pp = len(stages) // virtual
    context = ParallelContext.create(detect(), Sizes(tensor=tp, pipeline=pp), virtual_stages=virtual)
    shape = ModelShape.from_hf_dir(source)
    vocabulary = shape.padded_vocab_size(tp) + more_vocabulary
    chunks = build_model_parts(
        shape, PipelineLayout(stages, pp, virtual), ModelOptions(), context, vocabulary
    )
    checkpoint = HFCheckpoint(source)
    for chunk in chunks:
        torch.nn.init.ones_(next(chunk.parameters()))  # stale values must not survive in the padding
        load_hf_weights(chunk, shape, checkpoint, context, chunk.first_layer)
    if drop and context.pp_rank == pp - 1:
        chunks[-1].register_parameter(drop, torch.nn.Parameter(torch.ones(2)))
    pairs = [(chunk, chunk.first_layer) for chunk in chunks]
    options = dict(dtype=dtype, max_shard_bytes=max_shard_bytes)
    try:
        with limited_files(file_limit):
            export_hf(pairs, shape, out, context=context, assets=assets, **options)
    except MkdError as error:
        return error.report()
    return None


class limited_files:
    """Limit the files of this process to `limit` bytes, as a stand-in for a full disk."""

    def __init__(self, limit):
        self.limit = limit

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return a function of a family that returns its folder, made once."""
    folders = {}

    def get(family):
        if family not in folders:
            folders[family] = make_model(tmp_path_factory.mktemp(family), family)
            (folders[family] / "tokenizer.json").write_text("{}")
        return folders[family]

    return get


@pytest.fixture(scope="module")
def digests():
    """family -> digests of its first export, which every other layout must repeat."""
    return {}


def digest(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different


CASES = [(family, name, *spec) for family in DENSE for name, spec in LAYOUTS.items()]
CASES += [("moonlight", name, *LAYOUTS[name]) for name in ("tp1", "tp2_pp2")]
CASES += [("deepseek-experts", name, *LAYOUTS[name]) for name in ("tp1", "tp2_pp2")]
CASES += [("llama3.2", name, *spec) for name, spec in MORE_LAYOUTS.items()]


@pytest.mark.parametrize(("family", "name", "world_size", "layout"), CASES, ids=lambda value: str(value))
def test_round_trip_is_bitwise_and_independent_of_the_layout(
    ranks, originals, digests, tmp_path, family, name, world_size, layout
):
    source, out = originals(family), tmp_path / "out"
    assert ranks.run(import_export, world_size, source, out, layout) == [None] * world_size
    assert_same_tensors(all_tensors(out), all_tensors(source))
    assert digest(out) == digests.setdefault(family, digest(out))
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_biases_of_expert_choice_stay_in_fp32(ranks, originals, tmp_path):
    folder = originals("deepseek-experts")
    assert ranks.run(import_export, 1, folder, tmp_path / "out", (1, (4,), 1), torch.bfloat16) == [None]
    found, expected = all_tensors(tmp_path / "out"), all_tensors(folder)
    for name, tensor in found.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, expected[name] if is_bias else expected[name].bfloat16()), name


def test_vocabulary_padded_for_the_other_model_of_a_pair(ranks, originals, tmp_path):
    source = originals("llama")
    assert ranks.run(import_export, 2, source, tmp_path, (1, (2, 2), 1), None, 60_000, 128) == [None, None]
    assert_same_tensors(all_tensors(tmp_path), all_tensors(source))


def test_transformers_loads_the_export_and_computes_the_same(ranks, originals, tmp_path):
    from transformers import AutoModelForCausalLM

    source = originals("qwen2")
    ranks.run(import_export, 2, source, tmp_path, (2, (4,), 1))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        assert torch.equal(loaded(ids).logits, expected)


def test_one_file_without_index_when_it_fits(ranks, originals, tmp_path):
    source, out = originals("mistral"), tmp_path / "new" / "out"
    assert ranks.run(import_export, 1, source, out, (1, (4,), 1), torch.bfloat16, 5_000_000_000) == [None]
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in out.iterdir()} == names
    expected = {name: tensor.bfloat16() for name, tensor in all_tensors(source).items()}
    assert_same_tensors(all_tensors(out), expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_dtype_key_of_older_configurations_is_kept(ranks, tmp_path):
    source, out = make_model(tmp_path / "old", "llama"), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    assert ranks.run(import_export, 1, source, out, (1, (4,), 1), torch.float16) == [None]
    assert json.loads((out / "config.json").read_text()) == config | {"torch_dtype": "float16"}


def test_files_follow_the_umask(ranks, originals, tmp_path):
    before = os.umask(0o022)
    os.umask(before)
    assert ranks.run(import_export, 1, originals("llama"), tmp_path, (1, (4,), 1)) == [None]
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {0o666 & ~before}


def test_an_older_export_is_replaced_without_leftovers(ranks, originals, tmp_path):
    first, second = originals("llama"), originals("qwen3")
    ranks.run(import_export, 1, first, tmp_path, (1, (4,), 1), None, 30_000)
    (tmp_path / "README.md").write_text("mine")
    many = {file.name for file in tmp_path.glob("model-*")}
    ranks.run(import_export, 1, second, tmp_path, (1, (4,), 1), None, 150_000)
    few = {file.name for file in tmp_path.glob("model-*")}
    assert few and not many & few
    assert_same_tensors(all_tensors(tmp_path), all_tensors(second))
    ranks.run(import_export, 1, first, tmp_path, (1, (4,), 1), None, 5_000_000_000)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert (tmp_path / "README.md").read_text() == "mine"


# transformers writes the second template of a tokenizer there
TOOLS = "additional_chat_templates/tool_use.jinja"


def test_a_tokenizer_is_replaced_as_a_whole_or_stays(ranks, originals, tmp_path):
    """The tokenizer comes from another folder than the configuration, from SentencePiece, or is missing."""
    source, out, other = originals("llama"), tmp_path / "out", tmp_path / "other"
    old = "additional_chat_templates/old.jinja"
    for folder, names in (
        (out, ("vocab.json", "chat_template.jinja", old)),
        (other, ("tokenizer.json", "config.json", TOOLS)),
    ):
        (folder / TOOLS).parent.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f'"{name} of {folder.name}"')
    config = json.loads((source / "config.json").read_text())

    def tokenizer_after(tokenizer):
        options = ((1, (4,), 1), None, 5_000_000_000, 0, None, "", HFAssets(source, tokenizer))
        assert ranks.run(import_export, 1, source, out, *options) == [None]
        assert json.loads((out / "config.json").read_text()) == config
        model = {"config.json", "generation_config.json", "model.safetensors"}
        files = {file.relative_to(out).as_posix(): file for file in out.rglob("*") if file.is_file()}
        return {name: file.read_text() for name, file in files.items() if name not in model}

    mine = {name: f'"{name} of out"' for name in ("vocab.json", "chat_template.jinja", old)}
    assert tokenizer_after(None) == mine
    assert tokenizer_after(make_bare(tmp_path / "bare")) == mine
    assert tokenizer_after(other) == {name: f'"{name} of other"' for name in ("tokenizer.json", TOOLS)}
    shutil.rmtree((out / TOOLS).parent)
    (out / TOOLS).parent.symlink_to(tmp_path)  # the export replaces the link and does not follow it
    assert tokenizer_after(other) == {name: f'"{name} of other"' for name in ("tokenizer.json", TOOLS)}
    assert not (tmp_path / Path(TOOLS).name).exists()
    (tmp_path / "some name.model").write_text("pieces")
    assert tokenizer_after(tmp_path / "some name.model") == {"tokenizer.model": "pieces"}


def make_bare(folder):
    """Make a model's folder without a tokenizer."""
    folder.mkdir()
    (folder / "config.json").touch()
    return folder


@pytest.mark.fault(34)
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_the_older_export(ranks, originals, tmp_path):
    source = originals("llama")
    ranks.run(import_export, 1, source, tmp_path, (1, (4,), 1))
    before = digest(tmp_path)
    results = ranks.run(import_export, 4, source, tmp_path, (2, (2, 2), 1), None, 60_000, 0, 50_000)
    for message in results:
        assert f"the Hugging Face export to {tmp_path} failed: [Errno 27]" in message
        assert "GiB" in message and "make room" in message
    assert digest(tmp_path) == before


def test_a_folder_that_cannot_be_made(ranks, originals, tmp_path):
    (tmp_path / "file").write_text("")
    results = ranks.run(import_export, 2, originals("llama"), tmp_path / "file" / "out", (1, (2, 2), 1))
    assert all(message.startswith("error[save-not-writable]") for message in results)


def test_the_reference_is_never_overwritten(ranks, originals):
    source = originals("llama")
    (message,) = ranks.run(import_export, 1, source, source, (1, (4,), 1))
    assert message.startswith("error[save-folder-taken]")


def test_a_reference_of_another_model(ranks, originals, tmp_path):
    (message,) = ranks.run(export_with_other_reference, 1, originals("llama"), originals("qwen3"), tmp_path)
    assert message.startswith("error[checkpoint-of-another-model]") and "head_dim 16 instead of 8" in message


def export_with_other_reference(source, reference, out):
    context = ParallelContext.create(detect())
    shape = ModelShape.from_hf_dir(source)
    (chunk,) = build_model_parts(shape, PipelineLayout.even(4, 1), ModelOptions(), context)
    with pytest.raises(MkdError) as caught:
        export_hf([(chunk, 0)], shape, out, context=context, assets=HFAssets.of(reference))
    return caught.value.report()


def test_a_problem_of_one_stage_is_raised_on_all(ranks, originals, tmp_path):
    results = ranks.run(
        import_export, 2, originals("llama"), tmp_path, (1, (2, 2), 1), None, 60_000, 0, None, "extra"
    )
    assert all(message.startswith("error[hf-tensor-unexpected]") for message in results)


def test_plan_counts_shards_from_shapes_alone(originals):
    shape = ModelShape.from_hf_dir(originals("llama"))
    total = sum(tensor.numel() for tensor in all_tensors(originals("llama")).values())
    for limit in (1, 20_000, 100_000, 10**9):
        plan = export_plan(shape, torch.bfloat16, limit)
        assert plan.total_bytes == 2 * total
        count = len(plan.shards)
        if count > 1:
            assert [shard.file for shard in plan.shards] == [
                f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
            ]
        sizes = [
            sum(2 * torch.Size(full).numel() for full in shard.tensors.values()) for shard in plan.shards
        ]
        for shard, size in zip(plan.shards, sizes, strict=True):
            assert size <= limit or len(shard.tensors) == 1
        assert json.loads(plan.index())["metadata"]["total_size"] == 2 * total
    assert plan.last_file == "model.safetensors"
    assert export_plan(shape, torch.bfloat16, 20_000).last_file == INDEX_FILE


def test_integers_cannot_be_exported(originals):
    with refused("value-unknown: cannot export", UsageError):
        export_plan(ModelShape.from_hf_dir(originals("llama")), torch.int8)
