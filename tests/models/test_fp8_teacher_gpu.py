"""Check a teacher in FP8 on GPUs: products, what is kept, the same bits wherever it is, and loading."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.models.test_fp8_teacher import linears, source_of
from tests.models.test_residency_gpu import COMPUTATION_LASTS, COPIES_LAST, SIZES, costs, outputs, row
from tests.ranks import skip_unless_gpus_take
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu
RECIPES = "tensorwise", "blockwise"
SHORT = 16, 24, 72, 1000  # tokens of a row: multiples of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = SIZES | dict(num_hidden_layers=12)
    return make_model(tmp_path_factory.mktemp("fp8_gpu") / "teacher", "qwen3", scale=1.0, **sizes)


@pytest.fixture(scope="module")
def measured(folder, gpu_ranks):
    """Return the measurements of one process, by recipe. They are made at once: a process starts slowly."""
    return gpu_ranks.run(measure, 1, folder)[0]


def context_and_source(folder):
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    return ParallelContext.create(detect()), source_of(folder)


def teacher(source, context, **settings):
    """Return the teacher in bf16 with these settings."""
    from mkd.config.models import TeacherConfig
    from mkd.models.transformer_config import ModelOptions
    from mkd.plan.layout import PipelineLayout
    from mkd.run.build_models import build_teacher_parts

    layout, options = PipelineLayout.even(source.shape.num_layers, 1), ModelOptions(dtype=torch.bfloat16)
    (part,) = build_teacher_parts(source, TeacherConfig(**settings), layout, options, context)
    return part.eval().requires_grad_(False)


@torch.no_grad()
def measure(folder):
    context, source = context_and_source(folder)
    plain = teacher(source, context)
    found = {}
    for recipe in RECIPES:
        settings = dict(precision="fp8", fp8_recipe=recipe)
        costs(context, teacher(source, context, **settings))  # makes the workspaces of the kernels
        gc.collect()
        found[recipe] = products(context, source, plain, settings) | dict(
            elsewhere=elsewhere(context, source, settings, residency="host"),
            difference=difference(context, source, plain, settings),
            loading={place: loading(context, source, plain, settings, place) for place in ("device", "host")},
            short=short_rows(context, source, settings),
        )
    return found


def products(context, source, plain, settings):
    """Return errors of weights and products, copies beside the FP8 numbers, and bytes over those in bf16."""
    from mkd.models.placed.fp8_weights import fp8_recipe

    before = torch.cuda.memory_allocated()
    model = teacher(source, context, **settings)
    costs(context, model)
    kept = torch.cuda.memory_allocated() - before
    weights, results, copies = [], [], 0
    for one, other in zip(linears(model), linears(plain), strict=True):
        weights.append(error(one.weight.dequantize().float(), other.weight.float()))
        names = "_transpose", "_columnwise_data", "_columnwise_scale_inv"
        copies += any(getattr(one.weight, name, None) is not None for name in names)
        copies += "weight" in one._parameters or bool(getattr(one, "_fp8_workspaces", None))
    for layer in model.decoder.layers[:2]:
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            x = torch.randn(256, 1, linear.weight.shape[1], device=context.device, dtype=torch.bfloat16)
            with fp8_recipe(settings["fp8_recipe"]).running():
                product = linear(x)[0]
            results.append(error(product.float(), x.float() @ linear.weight.dequantize().float().t()))
    layers, rest = bytes_in_bf16(plain)
    return dict(weights=max(weights), products=results, copies=copies, kept=(kept - rest) / sum(layers))


def bytes_in_bf16(plain):
    """Return the bytes of each layer, and of all the rest."""
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in plain.decoder.layers]
    return layers, sum(p.nbytes for p in plain.parameters()) - sum(layers)


def error(values, expected):
    return ((values - expected).norm() / expected.norm()).item()


def elsewhere(context, source, settings, **place):
    """Return (outputs of short and of long rows, costs of a forward), on the device and elsewhere."""
    found = []
    for more in ({}, place):
        model = teacher(source, context, **settings, **more)
        rows = [outputs(context, model, length) for length in (COPIES_LAST, COMPUTATION_LASTS)]
        found.append((rows, costs(context, model)))
    return found


def difference(context, source, plain, settings):
    """Return the relative error of the final states against the teacher in bf16."""
    model = teacher(source, context, **settings)
    return error(outputs(context, model, COPIES_LAST), outputs(context, plain, COPIES_LAST))


def loading(context, source, plain, settings, residency):
    """Return the largest memory while the teacher is built and loaded, a bound, and its bytes in bf16."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = teacher(source, context, **settings, residency=residency)
    peak = torch.cuda.max_memory_allocated() - before
    del model
    layers, rest = bytes_in_bf16(plain)
    kept = 0.53 * (sum(layers) if residency == "device" else 2 * max(layers))
    return peak, rest + kept + 2 * max(layers), rest + sum(layers)


def short_rows(context, source, settings):
    model = teacher(source, context, **settings)
    return [bool(row(context, 1, tokens)(model).isfinite().all()) for tokens in SHORT]


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_rounded_weights_and_nothing_else_is_kept(recipe, measured):
    """E4M3 has 3 bits of fraction: a relative error of 0.027 for weights, and as much for activations."""
    found = measured[recipe]
    assert 0.02 < found["weights"] < 0.035 and all(0.015 < one < 0.04 for one in found["products"])
    assert found["copies"] == 0 and 0.5 < found["kept"] < 0.53
    assert 0.001 < found["difference"] < 0.5
    assert found["short"] == [True] * len(SHORT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_layer_at_a_time_is_in_bf16(recipe, measured):
    for peak, bound, whole in measured[recipe]["loading"].values():
        assert peak < bound < 0.75 * whole, f"{peak} of {whole}"


def assert_same(device, other):
    """Check that a forward elsewhere has the same bits, allocates as much and synchronises as little."""
    for one, two in zip(device[0], other[0], strict=True):
        assert one.isfinite().all() and torch.equal(one, two)
    assert device[1] == other[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_gives_the_same_bits(recipe, measured):
    assert_same(*measured[recipe]["elsewhere"])


def over_peers(folder, peers):
    context, source = context_and_source(folder)
    place = dict(residency="peers", peers=peers)
    return [elsewhere(context, source, dict(precision="fp8", fp8_recipe=one), **place) for one in RECIPES]


def test_peers_give_the_same_bits(folder, gpu_ranks):
    skip_unless_gpus_take(2)
    for by_recipe in gpu_ranks.run(over_peers, 2, folder, 2):
        for device, other in by_recipe:
            assert_same(device, other)
