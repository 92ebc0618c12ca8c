"""Check FP8 weights of a teacher with a recipe for CPUs: what is kept, where, and what is multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.fp8_stand_in import rounded, stand_in_recipes
from tests.models.streamed import to_megatron
from tests.models.test_residency import run
from tests.tiny_models import make_model
from tools.benchmarks.measure import Arm, peak_bytes

NUM_LAYERS = 16


def source_of(folder, checkpoint=None):
    from mkd.checkpoint.folders import find_checkpoint
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.plan.models.model_shape import ModelShape
    from mkd.resolve.model_source import ModelSource

    shape = ModelShape.from_hf_dir(folder)
    load = find_checkpoint(checkpoint) if checkpoint else None
    return ModelSource(shape, folder, None if load else HFCheckpoint(folder), load)


def teacher(source, settings, context, dtype=torch.float32):
    from mkd.models.transformer_config import ModelOptions
    from mkd.plan.layout import PipelineLayout
    from mkd.run.build_models import build_teacher_parts

    layout = PipelineLayout.even(source.shape.num_layers, 1)
    options = ModelOptions(dtype=dtype, sequence_parallel=context.tp_size > 1)
    with stand_in_recipes():
        (part,) = build_teacher_parts(source, settings, layout, options, context)
    return part.eval().requires_grad_(False)


def with_rounded_weights(source, model, context):
    """Return the model without FP8 whose weights have the values of `model`'s."""
    from mkd.config.models import TeacherConfig
    from mkd.models.placed.fp8_weights import LINEARS

    plain = teacher(source, TeacherConfig(), context)
    largest = 0.0
    for layer, quantised in zip(plain.decoder.layers, model.decoder.layers, strict=True):
        for name in LINEARS:
            weight, other = layer.get_submodule(name).weight, quantised.get_submodule(name).weight
            values = rounded(other.fp8, other.scales)
            largest = max(largest, ((values - weight).norm() / weight.norm()).item())
            weight.data.copy_(values)
    return plain, largest


def outputs(folder, checkpoint, recipe, tp, peers):
    """Return (error of weights, outputs are of rounded weights, outputs elsewhere are the same, bytes)."""
    from mkd.config.models import TeacherConfig
    from mkd.parallel.context import ParallelContext
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    context, source = ParallelContext.create(detect(), Sizes(tensor=tp)), source_of(folder, checkpoint)
    settings = TeacherConfig(precision="fp8", fp8_recipe=recipe)
    elsewhere = [replace(settings, residency="host")]
    elsewhere += [replace(settings, residency="peers", peers=peers)] if peers else []
    with torch.no_grad():
        model = teacher(source, settings, context)
        found = [run(model, seed) for seed in (1, 2, 1)]
        plain, error = with_rounded_weights(source, model, context)
        is_rounded = [torch.equal(run(plain, 1), found[0]), torch.equal(found[0], found[2])]
        same = []
        for other in elsewhere:
            moved = teacher(source, other, context)
            same += [torch.equal(run(moved, seed), found[index]) for index, seed in enumerate((1, 2, 1))]
            assert all(one.weight.fp8.device == one.weight.device for one in linears(moved))
    return error, is_rounded, same, bytes_of(model, source)


def linears(model):
    from mkd.models.placed.fp8_weights import LINEARS

    return [layer.get_submodule(name) for layer in model.decoder.layers for name in LINEARS]


def bytes_of(model, source):
    """Return the bytes that the decoder layers keep, and the number of weights of their linear layers."""
    own = sum(p.nbytes for p in model.decoder.layers.parameters())
    fp8 = [tensor for one in linears(model) for tensor in (one.weight.fp8, one.weight.scales)]
    assert not any("weight" in one._parameters for one in linears(model))
    return own + sum(one.nbytes for one in fp8), sum(one.weight.numel() for one in linears(model))


@pytest.mark.parametrize(
    ("is_megatron", "recipe", "processes", "tp", "peers"),
    [
        (False, "tensorwise", 2, 1, 2),
        (True, "blockwise", 2, 2, None),
        (True, "tensorwise", 1, 1, None),
        (False, "blockwise", 2, 1, 2),
    ],
    ids=lambda value: str(value),
)
def test_layers_multiply_with_the_rounded_weights_wherever_they_are(
    is_megatron, recipe, processes, tp, peers, ranks, tmp_path
):
    """Nothing but one byte a weight, scales and small parameters is kept."""
    folder = make_model(tmp_path / "teacher", "qwen3", num_hidden_layers=5)
    checkpoint = tmp_path / "megatron" if is_megatron else None
    if is_megatron:
        ranks.run(to_megatron, 1, folder, checkpoint)
    for error, is_rounded, same, (kept, weights) in ranks.run(
        outputs, processes, folder, checkpoint, recipe, tp, peers
    ):
        assert 0.01 < error < 0.04 and all(is_rounded)
        assert len(same) == (6 if peers else 3) and all(same)
        assert weights < kept < 1.1 * weights


def peaks(folder, residency, peers):
    """Return (largest bytes while the teacher is built and loaded, bound on them, bytes of it in bf16)."""
    from mkd.config.models import TeacherConfig
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context, source = ParallelContext.create(detect()), source_of(folder)
    built = []

    def build(settings):
        built.append(teacher(source, settings, context, torch.bfloat16))

    plain = peak_bytes(Arm("plain", lambda: build(TeacherConfig())), context.device)
    settings = TeacherConfig(precision="fp8", residency=residency, peers=peers)
    peak = peak_bytes(Arm("fp8", lambda: build(settings)), context.device)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in built[0].decoder.layers]
    whole = sum(p.nbytes for p in built[0].parameters())
    kept, _ = bytes_of(built[1], source)
    on_device = kept if residency == "device" else kept / peers + 2 * kept / NUM_LAYERS
    # A layer in bf16, and what the stand-in computes with: the largest weight in fp32 thrice.
    bound = whole - sum(layers) + on_device + max(layers) + (plain - whole)
    return peak, bound, whole, layers[0]


@pytest.mark.parametrize(("residency", "processes"), [("device", 1), ("peers", 2)])
def test_the_bf16_teacher_is_never_whole_in_memory(residency, processes, ranks, tmp_path):
    folder = make_model(tmp_path / "teacher", "qwen3", num_hidden_layers=NUM_LAYERS)
    peers = 2 if residency == "peers" else None
    for peak, bound, whole, layer in ranks.run(peaks, processes, folder, residency, peers):
        assert peak < bound + 3 * layer < 0.85 * whole, f"{peak} of {whole}"
