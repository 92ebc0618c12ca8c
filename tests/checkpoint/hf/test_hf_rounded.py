"""Exports of rounded students: bytes at every layout, read back here, and loaded by transformers."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_rounded import RoundedFiles, RoundedWeights
from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.config.rounding_formats import Rounding
from mkd.errors import CheckpointError
from mkd.models.builder import build_model_parts
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect
from mkd.rounding.rounded_inputs import round_inputs, token_peak
from tests.checkpoint.saved_tensors import all_tensors
from tests.rounding.plain_rounding import GROUPS, rounded
from tests.tiny_models import make_model

KEPT = "model.layers.1.mlp.down_proj.weight"
SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3
)
EXPERTS = dict(
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rounded") / "model"
    return make_model(folder, "qwen3", seed=3, dtype=torch.bfloat16, head_dim=128, **SIZES)


def export(source, folders, tp: int, stages: tuple[int, ...]) -> None:
    """Export the model in `source` in each format. The parts in memory are rounded as in training."""
    context = ParallelContext.create(detect(), Sizes(tensor=tp, pipeline=len(stages)))
    shape, checkpoint = ModelShape.from_hf_dir(source), HFCheckpoint(source)
    layout, options = PipelineLayout(stages, len(stages)), ModelOptions(dtype=torch.bfloat16)
    parts = [(one, one.first_layer) for one in build_model_parts(shape, layout, options, context)]
    for name, (out, in_training) in folders.items():
        for part, first in parts:
            load_hf_weights(part, shape, checkpoint, context, first)
        rounding = Rounding(name, GROUPS[name], exclude=("*.1.mlp.down_proj",))  # none of an expert
        given = dict(context=context, assets=HFAssets.of(source))
        files = RoundedFiles.of(parts, shape, rounding, context)
        export_hf(parts, shape, out, rounded=files, max_shard_bytes=300_000, **given)
        RoundedWeights(parts, shape, rounding, context).round()
        export_hf(parts, shape, in_training, **given)


@pytest.fixture(scope="module")
def exports(source, ranks, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Return format -> (folder in the format, folder with the weights of training in bf16)."""
    folder = tmp_path_factory.mktemp("exports")
    folders = {name: (folder / name, folder / f"{name}-bf16") for name in GROUPS}
    ranks.run(export, 1, source, folders, 1, (2,))
    return folders


def test_every_layout_writes_the_same_bytes(source, exports, ranks, tmp_path):
    again = {name: (tmp_path / name, tmp_path / f"{name}-bf16") for name in GROUPS if name != "fp8-block"}
    ranks.run(export, 4, source, again, 2, (1, 1))
    for name, folders in again.items():
        for mine, first in zip(folders, exports[name], strict=True):
            files = sorted(path.name for path in first.glob("*.safetensors"))
            assert files and sorted(path.name for path in mine.glob("*.safetensors")) == files
            assert all((mine / file).read_bytes() == (first / file).read_bytes() for file in files), name


@pytest.mark.parametrize("name", GROUPS)
def test_files_hold_the_weights_of_training(name, source, exports):
    exact, (out, in_training) = all_tensors(source), exports[name]
    trained, read = all_tensors(in_training), HFCheckpoint(out)
    assert read.headers.keys() == trained.keys() == exact.keys()
    num_rounded = 0
    for tensor, weight in trained.items():
        whole = read.read_whole(tensor).to(torch.bfloat16)
        assert torch.equal(whole, weight), tensor
        is_rounded = "_proj" in tensor and tensor != KEPT
        num_rounded += is_rounded
        if not is_rounded:
            assert torch.equal(weight, exact[tensor]), tensor
        elif "layers.0" in tensor:
            parts = next((one for one in FUSED if any(part in tensor for part in one)), ())
            own = next((part for part in parts if part in tensor), "")
            peaks = [exact[tensor.replace(own, part)].abs().max().float() for part in parts]
            peak = torch.stack(peaks).max() if peaks else None
            assert torch.equal(weight, rounded(exact[tensor], name, peak).bfloat16()), tensor
        if weight.dim() == 2:  # parts that no group or word ends with
            cut = slice(3, weight.shape[0] - 5), slice(33, 123)
            assert torch.equal(read.read(tensor, cut).to(torch.bfloat16), weight[cut])
    assert num_rounded == 13
    quantised = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantised["ignore"] == ["lm_head", KEPT.removesuffix(".weight")]
    assert "quantization_config" not in json.loads((in_training / "config.json").read_text())


@pytest.mark.parametrize("name", GROUPS)
def test_transformers_computes_the_logits_of_the_trained_weights(name, exports):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder in exports[name]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)


def test_other_formats_of_the_library_are_refused(exports, tmp_path):
    folder = shutil.copytree(exports["int4"][0], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        HFCheckpoint(folder)
    assert caught.value.code == "hf-quantisation-not-supported"


@pytest.mark.parametrize("name", ["int8", "fp8", "nvfp4"])
def test_transformers_rounds_inputs_as_we_do(name, source, exports, ranks, tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    out, tokens = tmp_path / name, torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(exports[name][1], dtype=torch.bfloat16).eval()
    linears = {one: module for one, module in plain.named_modules() if f"{one}.weight" != KEPT}
    linears = {f"{one}.weight": module for one, module in linears.items() if one.endswith("_proj")}
    peaks = {one: 4.0 + index for index, one in enumerate(linears)}  # some inputs are larger
    ranks.run(export_with_inputs, 1, source, out, name, peaks)
    for tensor, module in linears.items():
        module.register_forward_pre_hook(partial(round_before, name, peaks[tensor]))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_exact_inputs_of_a_model_that_rounds_them_are_named_once(source, ranks, tmp_path, caplog):
    ranks.run(export_with_inputs, 1, source, tmp_path / "w8a8", "int8", {})
    HFCheckpoint(tmp_path / "w8a8")
    HFCheckpoint(tmp_path / "w8a8")
    assert caplog.text.count("rounds inputs of its matrices in a server; here they stay exact") == 1


def export_with_inputs(source, out, name: str, peaks: dict[str, float]) -> None:
    context = ParallelContext.create(detect(), Sizes())
    shape, options = ModelShape.from_hf_dir(source), ModelOptions(dtype=torch.bfloat16)
    (part,) = build_model_parts(shape, PipelineLayout((2,), 1), options, context)
    load_hf_weights(part, shape, HFCheckpoint(source), context)
    entry = Rounding(name, GROUPS[name], ("*.1.mlp.down_proj",), inputs=True).as_json()
    state = {"rounding": entry | {"input_peaks": peaks, "is_calibrated": True}}
    files = RoundedFiles.of_entry([(part, 0)], shape, state, context)
    export_hf([(part, 0)], shape, out, rounded=files, context=context, assets=HFAssets.of(source))


def round_before(name: str, peak: float, module, given):
    """Round the input of a linear layer as transformers does, in bf16."""
    (x,) = given
    of_token = token_peak(x) if name != "nvfp4" else torch.tensor([peak])
    return round_inputs(x, name, of_token, dtype=torch.bfloat16)


def test_experts_are_rounded_one_by_one(ranks, tmp_path):
    source = make_model(tmp_path / "model", "qwen3_moe", seed=3, dtype=torch.bfloat16, **EXPERTS)
    folders = {"int4": (tmp_path / "int4", tmp_path / "int4-bf16")}
    ranks.run(export, 1, source, folders, 1, (2,))
    exact, trained, read = (
        all_tensors(source),
        all_tensors(folders["int4"][1]),
        HFCheckpoint(folders["int4"][0]),
    )
    for tensor, weight in trained.items():
        is_rounded = "_proj" in tensor and tensor != KEPT  # the second layer is dense
        expected = rounded(exact[tensor], "int4").bfloat16() if is_rounded else exact[tensor]
        assert torch.equal(weight, expected) and torch.equal(read.read_whole(tensor).bfloat16(), weight), (
            tensor
        )
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    models = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16) for one in folders["int4"])
    with torch.no_grad():
        assert torch.equal(*(model.eval()(torch.arange(24)[None]).logits for model in models))
