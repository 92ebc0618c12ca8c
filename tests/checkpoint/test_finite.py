"""Weights that are NaN or infinite are refused by name while they are loaded, on every rank."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mkd.checkpoint.finite import first_not_finite, is_finite
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.errors import CheckpointError, MkdError
from tests.checkpoint.hf.test_hf_quantised import FP8, MXFP4, fp8, save
from tests.tiny_models import make_model
from tests.tiny_vision_models import make_vision_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_large_values_are_finite_and_one_value_that_is_not_is_found(dtype):
    largest = torch.finfo(dtype).max
    values = torch.full((3, 50), largest, dtype=dtype)
    assert is_finite(values) and is_finite(-values) and is_finite(values[:0])
    for bad in (math.nan, math.inf, -math.inf):
        one = torch.zeros(3, 50, dtype=dtype)
        one[2, 49] = bad
        assert not is_finite(one) and not is_finite(one[:, 49]) and is_finite(one[:, :49])
    both = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert not is_finite(both)


def test_nested_states_name_the_tensor():
    state = {"step": 3, "groups": [{"lr": torch.tensor(1.0)}, {"moments": torch.tensor([1.0, math.nan])}]}
    assert "1 of 2 values of tensor groups.1.moments" in first_not_finite("X", state).what
    state["groups"][1]["moments"].zero_()
    assert first_not_finite("X", state) is None


def spoil(folder: Path, ending: str, value: float = math.nan, at: int = 0) -> tuple[Path, str]:
    """Write `value` at place `at` of the first tensor whose name has `ending`; return its file and name."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        name = next((one for one in sorted(tensors) if one.endswith(ending)), None)
        if name is not None:
            tensors[name].view(-1)[at] = value
            save_file(tensors, file)
            return file, name
    raise AssertionError(f"{folder} has no {ending}")


def quantised(folder: Path, quantisation: dict) -> Path:
    values, scales = fp8(256, 256)
    if quantisation is MXFP4:
        values, scales = (torch.zeros(size, dtype=torch.uint8) for size in ((2, 64, 2, 16), (2, 64, 2)))
        return save(folder, MXFP4, {"a_blocks": values, "a_scales": scales})
    return save(folder, FP8, {"a": values, "a_scale_inv": scales})


@pytest.mark.parametrize(
    ("make", "ending", "value"),
    [
        (partial(make_model, family="llama"), "model.norm.weight", -math.inf),
        (partial(make_model, family="deepseek-experts"), "gate.e_score_correction_bias", math.nan),
        (partial(make_vision_model, family="smolvlm"), "proj.weight", math.nan),
        (partial(quantised, quantisation=FP8), "a_scale_inv", math.inf),
        (partial(quantised, quantisation=MXFP4), "a_scales", 255),
    ],
)
def test_every_kind_of_tensor_is_refused(make, ending, value, tmp_path):
    """Weights, buffers, projectors of images, scales of quantised weights."""
    folder = make(tmp_path / "model")
    file, name = spoil(folder, ending, value)
    checkpoint, found = HFCheckpoint(folder), []
    for tensor, header in (checkpoint.headers | checkpoint.tower).items():
        try:
            checkpoint.read(tensor, tuple(slice(0, size) for size in header.shape))
        except CheckpointError as error:
            found.append(error)
    assert [error.code for error in found] == ["weights-not-finite"] and found[0].exit_code == 66
    assert found[0].what.startswith(f"{file}: ") and name in found[0].what


def load_bad(folder: Path, checkpoint: Path | None, residency: str) -> str:
    """Return the error of loading a teacher; `checkpoint` is read, or the folder itself."""
    from mkd.config.models import TeacherConfig
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect
    from mkd.resolve.model_source import ModelSource
    from mkd.run.build_models import build_teacher_parts

    peers = 2 if residency == "peers" else None
    context = ParallelContext.create(detect(), Sizes(tensor=1 if peers else dist.get_world_size()))
    shape = ModelShape.from_hf_dir(folder)
    source = ModelSource(shape, folder, None if checkpoint else HFCheckpoint(folder), checkpoint)
    settings = TeacherConfig(residency=residency, peers=peers)
    layout = PipelineLayout.even(shape.num_layers, 1)
    try:
        build_teacher_parts(source, settings, layout, ModelOptions(), context)
    except MkdError as error:
        return error.report()
    return "loaded"


def save_bad(folder: Path, out: Path) -> Path:
    """Save the model in `folder` as a Megatron checkpoint, with one infinite weight in layer 2."""
    from mkd.checkpoint.distributed import TrainingState, save_checkpoint
    from mkd.checkpoint.folders import TrainingPosition
    from mkd.convert.models import load_from_hf
    from mkd.parallel.context import ParallelContext
    from mkd.plan.models.model_shape import ModelShape
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    model = load_from_hf(folder, ModelShape.from_hf_dir(folder), torch.float32, context)
    with torch.no_grad():
        model.decoder.layers[2].mlp.linear_fc2.weight[3, -1] = math.inf
    return save_checkpoint(out, TrainingState([model]), TrainingPosition(), context, None)


def test_one_bad_rank_ends_all_with_its_error(tmp_path, ranks):
    """At TP 2 only rank 1 reads the last element."""
    good = make_model(tmp_path / "good", "llama")
    bad = shutil.copytree(good, tmp_path / "bad")
    file, name = spoil(bad, "layers.2.mlp.down_proj.weight", at=-1)
    (checkpoint,) = ranks.run(save_bad, 1, good, tmp_path / "save")
    for residency in ("device", "host", "peers"):
        first, second = ranks.run(load_bad, 2, bad, None, residency)
        assert first == second and f"error[weights-not-finite]: {file}: 1 of" in first and name in first
        first, second = ranks.run(load_bad, 2, good, checkpoint, residency)
        assert first == second and f"error[weights-not-finite]: {checkpoint}: 1 of" in first
        assert "decoder.layers.2.mlp.linear_fc2.weight" in first
    (alone,) = ranks.run(load_bad, 1, good, checkpoint, "host")  # reads all layers at once
    assert "error[weights-not-finite]" in alone and "decoder.layers.2.mlp.linear_fc2.weight" in alone
