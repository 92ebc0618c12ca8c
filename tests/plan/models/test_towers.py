"""Vision towers in plans: parameters, work, and their place on the first stage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.config.load import load_config
from mkd.models.vision.tower import VisionTower
from mkd.plan.footprint.memory import GIB, predict_memory
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import model_parameters
from mkd.plan.models.towers import _moved_bytes, tower_parameters, tower_work, towers_time
from mkd.plan.times.layer_time import Rates
from tests.families.test_vision_configs import HUB_QWEN, HUB_SMOLVLM
from tests.plan.shapes import cost_of
from tests.run_facts import facts_of, forecast_of
from tests.tiny_vision_models import FAMILIES, make_vision_model
from tools.benchmarks.shapes import shape_of

QWEN, SMOLVLM = ModelShape.from_hf_config(HUB_QWEN), ModelShape.from_hf_config(HUB_SMOLVLM)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_files(family, tmp_path):
    folder = make_vision_model(tmp_path, family)
    shape, stored = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
    projector = ("tower.connector.", "tower.visual.merger.", "tower.visual.deepstack_merger_list.")
    sizes = {name: math.prod(header.shape) for name, header in stored.tower.items()}
    of_projector = sum(size for name, size in sizes.items() if name.startswith(projector))
    assert tower_parameters(shape) == (sum(sizes.values()) - of_projector, of_projector)
    text = sum(math.prod(header.shape) for header in stored.headers.values())
    assert model_parameters(shape).total == text + sum(sizes.values())


@pytest.mark.parametrize("shape, gflop", [(QWEN, 5.5), (SMOLVLM, 3.3)])
def test_work_of_an_image_token(shape, gflop):
    """The figures come from the sizes of the towers by hand, with images of slightly other sizes."""
    assert tower_work(shape, 1).flops / 1e9 == pytest.approx(gflop, rel=0.05)
    assert tower_work(replace(shape, vision=None), 1).flops == 0


def test_the_step_beside_the_towers_takes_as_long_as_measured():
    """Compare with the pair of docs/vision.md on one H200, less the forward of both towers."""
    student, teacher = (shape_of(f"qwen2.5-vl-{size}") for size in ("3b", "7b"))
    argv = ["--student-hf", "s", "--teacher-hf", "t", "--kd-ratio", "1", "--bf16", "--data-path", "x.jsonl"]
    argv += ["--seq-length", "8192", "--global-batch-size", "4", "--train-iters", "1"]
    settings = load_config(argv).config
    towers_ms = 4 * towers_time(settings, student, [teacher], Rates()).forward_ms
    planned_ms = forecast_of(settings, 1, student, [teacher]).planned_step_ms()
    assert planned_ms - towers_ms == pytest.approx(2928.9 - 992.4, rel=0.05)


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes that elementwise operations read and write."""

    KERNELS = ("_to_copy", "pow", "mean", "mul", "neg", "cat", "add", "silu", "gelu", "native_layer_norm")
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.KERNELS:
            tensors = [one for one in tree_leaves((args, result)) if isinstance(one, torch.Tensor)]
            self.total += sum(one.numel() * one.itemsize for one in tensors)
        return result


@pytest.mark.parametrize("hub", [HUB_QWEN, HUB_SMOLVLM], ids=("qwen2.5", "smolvlm"))
def test_bytes_of_elementwise_kernels_are_those_of_a_block(hub):
    """One block of the released width in bf16. On a CPU attention also joins images, 2 % of Qwen's bytes."""
    shape = ModelShape.from_hf_config(hub)
    one = dict(shape.hf_config["vision_config"]) | dict(depth=1, num_hidden_layers=1)
    shape, patches = ModelShape.from_hf_config(hub | dict(vision_config=one)), 64
    vision, tower = shape.vision, VisionTower(shape, torch.bfloat16, torch.device("cpu"))
    hidden = torch.zeros(patches, vision.hidden_size, dtype=torch.bfloat16)
    angles = torch.zeros(patches, vision.hidden_size // vision.num_heads)
    with torch.no_grad(), MovedBytes() as moved:
        if vision.image_size:
            tower.vision_model.encoder.layers[0](hidden[None], attention_mask=None)
        else:
            borders = torch.tensor([0, patches], dtype=torch.int32)
            tower.visual.blocks[0](hidden, cu_seqlens=borders, position_embeddings=(angles, angles))
    assert moved.total / patches == pytest.approx(_moved_bytes(vision, 2), rel=0.04)


def config(*parts, layout=("--pipeline-layout", "auto")):
    argv = ["--student-hf", "s", "--teacher-hf", "t", "--pipeline-model-parallel-size", "4", "--bf16"]
    argv += [*layout, "--seq-length", "8192", "--global-batch-size", "8"]
    return load_config([*argv, "--student-train-parts", "text", *parts]).config


def test_towers_take_layers_and_memory_from_the_first_stage():
    text = replace(QWEN, vision=None)
    (with_towers, (teacher,)), (without, _) = (
        facts_of(config("projector"), 4, one, [one]).layouts for one in (QWEN, text)
    )
    assert with_towers.layers[0] + teacher.layers[0] < 2 * without.layers[0]
    split = ",".join(map(str, without.layers))
    layout = "--student-pipeline-layout", split, "--teacher-pipeline-layout", split
    trained, frozen, nothing = (
        predict_memory(facts_of(config(*parts, layout=layout), 4, one, [one])).ranks
        for parts, one in ((("tower", "projector"), QWEN), ((), QWEN), ((), text))
    )
    size = tower_parameters(QWEN).total / GIB
    assert frozen[0].student_gib - nothing[0].student_gib == pytest.approx(2 * size)
    assert frozen[0].teacher_gib - nothing[0].teacher_gib == pytest.approx(2 * size)
    assert frozen[0].gradients_gib == nothing[0].gradients_gib
    assert trained[0].gradients_gib - frozen[0].gradients_gib == pytest.approx(4 * size)
    assert trained[0].optimizer_gib - frozen[0].optimizer_gib == pytest.approx(12 * size)
    assert trained[0].activations_gib > frozen[0].activations_gib
    assert trained[1:] == frozen[1:] == nothing[1:]


def test_a_trained_tower_costs_its_backward():
    costs = [cost_of(config(*parts), QWEN, (SMOLVLM,), 4) for parts in (("tower",), ())]
    assert costs[0].towers.forward_ms == costs[1].towers.forward_ms > 0
    assert costs[0].towers.backward_ms > costs[1].towers.backward_ms == 0
    assert costs[0].towers.backward_ms < 3 * costs[0].towers.forward_ms  # the teacher's has none


def test_without_image_tokens_the_times_are_those_of_texts():
    given, text = ("--image-token-share", "0"), replace(QWEN, vision=None)
    with_towers, without = (cost_of(config(layout=given), one, (one,), 4) for one in (QWEN, text))
    assert with_towers == without


def test_the_recipe_of_qwen_fits_on_gpus_of_80_gib():
    recipe = Path(__file__).resolve().parents[3] / "configs" / "qwen2.5_vl_3b_from_7b.yaml"
    pair = [shape_of(f"qwen2.5-vl-{size}") for size in ("3b", "7b")]
    assert pair[0].differences(QWEN) == []
    forecast = forecast_of(load_config(["--config", str(recipe)]).config, 8, pair[0], pair[1:])
    assert 60 < forecast.figures()["peak_memory_gib"] < 76
