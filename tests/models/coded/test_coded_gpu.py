"""Check experts of codes on GPUs: kernels against torch, products, and whole layers without waits."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.models.test_fp8_teacher import source_of
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu
SIZES = dict(
    hidden_size=512,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=1000,
    num_experts=16,
    num_local_experts=16,
    num_experts_per_tok=4,
    mlp_only_layers=[],
    max_position_embeddings=4096,
)
COUNTS = 3, 0, 130, 256, 1, 0, 515  # rows of experts
WIDTHS = (272, 320), (256, 384), (1536, 2048)  # of matrices [out, in]


def random_stack(form, rows, columns, generator):
    """Return the codes of random matrices, some of whose rows are much larger, and the matrices."""
    from mkd.models.coded.coded_product import CodedStack

    device, size = generator.device, len(COUNTS)
    matrices = torch.randn(size, rows, columns, device=device, generator=generator)
    matrices *= torch.rand(size, rows, 1, device=device, generator=generator).pow(4) + 0.01
    codes = torch.empty(size, *form.codes_shape(rows, columns), dtype=torch.uint8, device=device)
    scales = torch.empty(size, *form.scales_shape(rows, columns), dtype=form.scale_dtype, device=device)
    for matrix, own_codes, own_scales in zip(matrices, codes, scales, strict=True):
        form.encode(matrix, own_codes, own_scales)
    return CodedStack(form, rows, columns, codes, scales), matrices


def relative(values, expected):
    return ((values.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize(("rows", "columns"), WIDTHS)
@pytest.mark.parametrize("group", [0, 128])
def test_products_are_those_of_the_codes(group, rows, columns):
    """The kernels compute in FP8 what torch computes in fp32 with the same rounded numbers."""
    from mkd.models.coded import coded_product as products
    from mkd.models.coded.number_codes import BlockCodes, RowCodes, to_fp8

    generator = torch.Generator("cuda").manual_seed(0)
    form = BlockCodes(input_group=128) if group else RowCodes(input_group=0)
    stack, matrices = random_stack(form, rows, columns, generator)
    x = 30 * torch.randn(sum(COUNTS), columns, device="cuda", generator=generator).bfloat16()
    x[5] = 0
    values, scales = products.rounded_rows(x, group)
    expected, expected_scales = to_fp8(x, group)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    of_experts = products.ExpertRows.of(torch.tensor(COUNTS), x.device)
    exact = products._one_by_one(x.float(), of_experts, stack)
    assert products.has_kernel(stack)
    found = products.coded_product(x, of_experts, stack)
    tiles = products.tiled_product(values, scales, of_experts, stack, torch.float32)
    errors = relative(found, exact), relative(tiles, exact)
    print(f"{form}, {rows} x {columns}: {errors}")
    assert errors[0] < 4e-3 and errors[1] < 2e-3  # the first is rounded to bf16
    unrounded = torch.cat(
        [part.float() @ matrix.t() for part, matrix in zip(x.split(COUNTS), matrices, strict=True)]
    )
    assert 0.01 < relative(found, unrounded) < 0.05


@pytest.mark.parametrize("name", ["blocks", "mxfp4"])
def test_stored_codes_are_decoded_exactly(name):
    """The product is that of matrices which were decoded when they were read, bit for bit."""
    from mkd.models.coded import coded_product as products
    from mkd.models.coded.number_codes import BlockCodes, MXFP4Codes
    from mkd.models.moe.grouped_product import grouped_mm

    generator = torch.Generator("cuda").manual_seed(1)
    for rows, columns in WIDTHS:
        if name == "blocks":
            stack, _ = random_stack(BlockCodes(), rows, columns, generator)
            stack.scales.mul_(torch.rand(stack.scales.shape, device="cuda", generator=generator) + 0.5)
        else:
            form, size = MXFP4Codes(), len(COUNTS)
            shapes = form.codes_shape(rows, columns), form.scales_shape(rows, columns)
            codes, scales = (
                torch.randint(*bounds, (size, *shape), device="cuda", generator=generator).to(torch.uint8)
                for bounds, shape in zip(((0, 256), (100, 140)), shapes, strict=True)
            )
            stack = products.CodedStack(form, rows, columns, codes, scales)
        decoded = stack.form.decoded(stack.codes, stack.scales).bfloat16()
        assert torch.equal(products.decoded_stack(stack), decoded)
        x = torch.randn(sum(COUNTS), columns, device="cuda", generator=generator).bfloat16()
        of_experts = products.ExpertRows.of(torch.tensor(COUNTS), x.device)
        expected = grouped_mm(x, decoded.transpose(1, 2), offs=of_experts.ends)
        assert torch.equal(products.coded_product(x, of_experts, stack), expected)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, gpu_ranks):
    folder = make_model(tmp_path_factory.mktemp("coded_gpu") / "teacher", "qwen3_moe", scale=1.0, **SIZES)
    return gpu_ranks.run(measure, 1, folder)[0]


@torch.no_grad()
def measure(folder):
    """Return outputs by recipe and place, layers as a graph, and calls that wait for the device."""
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect
    from tests.models.test_fp8_teacher_gpu import teacher
    from tests.models.test_residency_gpu import row

    context, source = ParallelContext.create(detect()), source_of(folder)
    run, found = row(context, 1, 1000), {}
    for precision in ("bf16", "tensorwise", "blockwise"):
        settings = dict(precision="fp8", fp8_recipe=precision) if precision != "bf16" else {}
        model = teacher(source, context, **settings)
        output = run(model).clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            again = run(model).clone()
            torch.cuda.set_sync_debug_mode("default")
        on_host = run(teacher(source, context, residency="host", **settings))
        found[precision] = dict(
            output=output.float().cpu(),
            same=[torch.equal(output, again), torch.equal(output, on_host)],
            waits=[str(one.message) for one in caught if "called a synchronizing" in str(one.message)],
            graphed=graphed(model, context, run, output),
        )
    return found


def graphed(model, context, run, output):
    """Return True if the layers as a CUDA graph have the same bits."""
    from mkd.models.graphs.graph_memory import GraphMemory
    from mkd.models.graphs.graphed_decoder import GraphedDecoder

    model.graphs = GraphedDecoder(model.decoder, "the teacher", model.rotary_pos_emb, GraphMemory())
    results = [run(model).clone() for _ in range(3)]
    model.graphs.release()
    model.graphs = None
    return all(torch.equal(one, output) for one in results)


def test_layers_in_fp8_do_not_wait_and_have_the_same_bits_on_the_host(measured):
    exact = measured["bf16"]["output"]
    for name, one in measured.items():
        error = relative(one["output"], exact)
        print(f"{name}: error of the final state {error:.4f}, waits {one['waits']}, graph {one['graphed']}")
        assert one["same"] == [True, True] and one["graphed"], name
        assert len(one["waits"]) == len(measured["bf16"]["waits"]), name
        assert name == "bf16" or 0.001 < error < 0.3
