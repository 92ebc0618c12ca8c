"""Check FP8 and MXFP4 weights, slice by slice, against transformers' dequantised tensors."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from mkd.checkpoint.hf.hf_quantised import TensorHeader
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_stacked import read_stacks
from mkd.errors import CheckpointError
from tests.checkpoint.hf.test_hf_writer import import_export
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import refused
from tests.tiny_models import make_model

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def save(folder, quantisation, tensors):
    """Save `tensors` and a configuration with `quantisation`; return the folder."""
    folder.mkdir(exist_ok=True)
    config = {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def fp8(rows, columns, block=(128, 128), seed=0):
    """Return values and scales of a random matrix whose blocks have very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = (100 * torch.randn(rows, columns, generator=generator)).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return values, torch.rand(grid, generator=generator).add(0.1).pow(8)


def dequantised(values, scales, block=(128, 128)):
    """Return fp32: every element times the scale of its block."""
    rows, columns = values.shape
    grid = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return values.float() * grid


def assert_slices_are_those_of(checkpoint, name, expected, bounds):
    assert checkpoint.headers[name].shape == tuple(expected.shape)
    for dim, start, length in bounds:
        cut = [slice(None)] * expected.dim()
        cut[dim] = slice(start, start + length)
        part = checkpoint.read(name, tuple(cut)).to(expected.dtype)
        assert torch.equal(part, expected.narrow(dim, start, length)), (dim, start, length)


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (130, 40)])
def test_fp8_blocks(shape, tmp_path):
    """The last two shapes do not divide into blocks, as DeepSeek-V3's latent projection."""
    values, scales = fp8(*shape)
    checkpoint = HFCheckpoint(save(tmp_path / "m", FP8, {"a.weight": values, "a.weight_scale_inv": scales}))
    assert checkpoint.headers.keys() == {"a.weight"} and checkpoint.headers["a.weight"].dtype == "BF16"
    expected = dequantised(values, scales)
    if shape == (256, 384):
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
        assert torch.equal(theirs, expected.bfloat16())
    rows, columns = shape
    bounds = [(0, 0, rows), (0, 127, 3), (0, rows - 1, 1), (1, 0, columns), (1, 17, 20), (1, columns - 9, 9)]
    assert_slices_are_those_of(checkpoint, "a.weight", expected, bounds)
    before = checkpoint.bytes_read
    checkpoint.read("a.weight", (slice(100, 120), slice(None)))  # within one row of blocks
    assert checkpoint.bytes_read - before == 20 * columns + 4 * scales.shape[1]


def test_mxfp4_is_exact_and_transposed(tmp_path):
    """The matrix is square, as GPT-OSS's: only the name tells the orientation."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 253, (3, 64, 2), dtype=torch.uint8, generator=generator)
    tensors = {"mlp.down_proj_blocks": blocks, "mlp.down_proj_scales": scales}
    checkpoint = HFCheckpoint(save(tmp_path / "m", MXFP4, tensors))
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert checkpoint.headers.keys() == {"mlp.down_proj"} and expected.shape == (3, 64, 64)
    bounds = [(0, 0, 3), (0, 2, 1), (1, 0, 64), (1, 5, 7), (1, 30, 20), (2, 0, 64), (2, 9, 11)]
    assert_slices_are_those_of(checkpoint, "mlp.down_proj", expected, bounds)
    before = checkpoint.bytes_read
    cut = (slice(1, 2), slice(20, 50), slice(3, 40))  # of every dimension at once
    assert torch.equal(checkpoint.read("mlp.down_proj", cut), expected[cut])
    assert checkpoint.bytes_read - before == 37 * 2 * 17


def test_quantised_stacks_are_not_turned(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl_moe"}')
    start = "model.language_model.layers.0.mlp.experts."
    headers = {
        f"{start}{name}": TensorHeader("f", (3, 8, 8), "BF16") for name in ("gate_up_proj", "down_proj")
    }
    assert read_stacks(tmp_path, headers, ())[1].keys() == headers.keys()
    for quantised in headers:
        assert read_stacks(tmp_path, headers, {quantised}) == (headers, {})


@pytest.fixture
def pair(tmp_path):
    """Return two folders of one model: FP8 with a layer that predicts further tokens, and dequantised."""
    plain = make_model(tmp_path / "plain", "llama", dtype=torch.bfloat16, shard_size="1GB")
    block, tensors, quantised = (32, 16), all_tensors(plain), {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.dim() == 2 and ".layers." in name:
            values, scales = fp8(*tensor.shape, block, seed)
            quantised |= {name: values, f"{name}_scale_inv": scales}
            tensors[name] = dequantised(values, scales, block).bfloat16()
        else:
            quantised[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    extra = {n.replace(".3.", ".4."): t.clone() for n, t in quantised.items() if ".3." in n}
    extra |= {"model.layers.4.eh_proj.weight": torch.ones(2, 3)}
    save_file(
        {name.replace(".3.", ".4."): tensor.clone() for name, tensor in tensors.items() if ".3." in name}
        | {"model.layers.4.eh_proj.weight": torch.ones(2, 3)},
        tmp_path / "further.safetensors",
    )
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": FP8 | {"weight_block_size": list(block)}, "num_nextn_predict_layers": 1}
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    save_file(quantised | extra, tmp_path / "fp8" / "model.safetensors")
    return plain, tmp_path / "fp8"


def test_a_quantised_model_is_exported_as_its_dequantised_tensors(pair, tmp_path, ranks):
    plain, folder = pair
    out = tmp_path / "out"
    assert ranks.run(import_export, 2, folder, out, (2, (4,), 1), torch.bfloat16) == [None, None]
    found = all_tensors(out)
    expected = all_tensors(plain) | load_file(tmp_path / "further.safetensors")  # which is not trained
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["num_nextn_predict_layers"] == 1
    assert ranks.run(load_and_log, 1, folder) == [["model.layers.4.*"]]


def load_and_log(folder):
    """Load a model and return what the log names in brackets."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mkd").addHandler(handler)
    try:
        import_export(folder, folder.parent / "again", (1, (4,), 1))
    finally:
        logging.getLogger("mkd").removeHandler(handler)
    return [re.search(r"\((.*)\)", line)[1] for line in lines if str(folder) in line]


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": "128"},
        {"quant_method": "bitsandbytes"},
        {"bits": 4},
    ],
)
def test_other_formats_are_refused(quantisation, tmp_path):
    values, scales = fp8(128, 128)
    folder = save(tmp_path / "m", quantisation, {"a.weight": values, "a.weight_scale_inv": scales})
    with refused("hf-quantisation-not-supported: the weights are quantised by", CheckpointError):
        HFCheckpoint(folder)


def test_scales_must_belong_to_their_values(tmp_path):
    values, scales = fp8(256, 128)
    blocks = torch.zeros(2, 8, 1, 16, dtype=torch.uint8)
    cases = [
        (FP8, {"a.weight": values, "a.weight_scale_inv": scales.T.contiguous()}),
        (FP8, {"a.weight": values, "a.weight_scale_inv": scales.to(torch.float8_e4m3fn)}),
        (FP8, {"a.weight": values.to(torch.int8), "a.weight_scale_inv": scales}),
        (MXFP4, {"a_blocks": blocks}),
        (MXFP4, {"a_blocks": blocks, "a_scales": blocks[:1, :, :, 0].contiguous()}),
        (MXFP4, {"a_blocks": blocks[..., :8].contiguous(), "a_scales": blocks[..., 0].contiguous()}),
    ]
    for number, (quantisation, tensors) in enumerate(cases):
        with refused("hf-files-damaged: is stored as", CheckpointError):
            HFCheckpoint(save(tmp_path / str(number), quantisation, tensors))
