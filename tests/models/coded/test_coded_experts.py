"""Check teachers whose experts are codes: numbers, layers against transformers, places, files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.coded.quantised_experts import fp8_blocks, mxfp4, with_other_experts
from tests.models.test_fp8_teacher import source_of
from tests.models.test_hf_parity import pack
from tests.tiny_models import make_model

# Two blocks, one of them short. One layer has experts, so that no token sees the experts of another.
SIZES = dict(hidden_size=160, moe_intermediate_size=144, num_hidden_layers=2, mlp_only_layers=[0])
TOKENS = 48
E4M3 = torch.tensor(
    sorted(
        {sign * (1 + m / 8) * 2.0**e for sign in (1, -1) for m in range(8) for e in range(-6, 9)}
        - {480, -480}
    )
    + [sign * m / 8 * 2.0**-6 for sign in (1, -1) for m in range(8)],
    dtype=torch.float64,
).unique()


def nearest_e4m3(x):
    """Return the nearest numbers of E4M3 by search, float64; ties go to the one with an even mantissa."""
    at = torch.searchsorted(E4M3, x.contiguous()).clamp(1, len(E4M3) - 1)
    low, high = E4M3[at - 1], E4M3[at]
    mantissa = (low.abs() / 2.0 ** torch.floor(torch.log2(low.abs().clamp(min=2.0**-6))) * 8).round() % 2
    is_low = (x - low < high - x) | ((x - low == high - x) & (mantissa == 0))
    return torch.where(is_low, low, high)


def rounded(x, rows=1, columns=None):
    """Return a matrix in FP8 with a power of two as scale of each block of so many rows and columns."""
    x, found = x.double(), torch.empty(x.shape, dtype=torch.float64)
    columns = columns or x.shape[1]
    for row in range(0, x.shape[0], rows):
        for column in range(0, x.shape[1], columns):
            block = x[row : row + rows, column : column + columns]
            largest = max(float(block.abs().max()), 2.0**-100)
            scale = 2.0 ** next(e for e in range(-120, 120) if 448 * 2.0**e >= largest)
            found[row : row + rows, column : column + columns] = nearest_e4m3(block / scale) * scale
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_codes_are_the_nearest_numbers(recipe):
    from mkd.models.coded.number_codes import BlockCodes, RowCodes, as_rounded

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, 200, generator=generator) * torch.rand(130, 1, generator=generator).pow(8)
    x[3], x[4, 7], x[5, 0] = 0, 448.0, 448.5
    form = RowCodes(input_group=0) if recipe == "tensorwise" else BlockCodes(input_group=128)
    codes = torch.empty(form.codes_shape(*x.shape), dtype=torch.uint8)
    scales = torch.empty(form.scales_shape(*x.shape))
    form.encode(x, codes, scales)
    blocks = (1, None) if recipe == "tensorwise" else (128, 128)
    expected = rounded(x, *blocks)
    found = form.decoded(codes, scales)
    assert torch.equal(found.double(), expected) and torch.equal(found, found.bfloat16().float())
    inputs = rounded(x, 1, None if recipe == "tensorwise" else 128)
    assert torch.equal(as_rounded(x, form.input_group).double(), inputs)


def row():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(307, (1, TOKENS), generator=generator)
    return tokens, torch.arange(TOKENS)[None]


@torch.no_grad()
def final_states(folder, settings, tp=1, ep=1, others=()):
    """Return the final state, the same elsewhere, and (codes are one byte, experts that are left)."""
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect
    from mkd.run.build_models import build_teacher_parts

    context = ParallelContext.create(detect(), Sizes(tensor=tp, expert=ep))
    source = source_of(folder)
    layout, options = PipelineLayout.even(source.shape.num_layers, 1), ModelOptions(sequence_parallel=tp > 1)

    def output(own):
        (part,) = build_teacher_parts(source, own, layout, options, context)
        part.eval().requires_grad_(False)
        found = part(*row(), packed_seq_params=pack((TOKENS - 10, 10), 0))[:, 0]
        left = [name for name, one in part.named_parameters() if ".experts." in name and one.dim() == 2]
        return found.clone(), left

    found, left = output(settings)
    same = [torch.equal(output(replace(settings, **place))[0], found) for place in others]
    if tp > 1:  # each process has some of the tokens
        parts = [torch.empty_like(found) for _ in range(tp)]
        torch.distributed.all_gather(parts, found)
        found = torch.cat(parts)
    return found, same, left


@torch.no_grad()
def expected_states(folder, recipe):
    """Return the final state of transformers in float64, whose experts round as the recipe does."""
    from transformers import AutoModelForCausalLM

    blocks, group = ((1, None), None) if recipe == "tensorwise" else ((128, 128), 128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def forward(experts, hidden, chosen, weights):
        output = torch.zeros_like(hidden)
        for expert in range(experts.num_experts):
            first, second = (
                rounded(one[expert], *blocks) for one in (experts.gate_up_proj, experts.down_proj)
            )
            for token, place in (chosen == expert).nonzero().tolist():
                gate, up = (rounded(hidden[token][None], 1, group) @ first.t()).chunk(2, dim=-1)
                inner = gate / (1 + torch.exp(-gate)) * up * weights[token, place]
                output[token] += (rounded(inner, 1, group) @ second.t())[0]
        return output

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            experts.forward = lambda *args, own=experts: forward(own, *args)
    tokens = row()[0]
    states = [model.model(part).last_hidden_state[0] for part in tokens.split([TOKENS - 10, 10], dim=1)]
    return torch.cat(states)


def assert_tokens_agree(found, expected):
    """Check final states token by token.

    An input that lies between two numbers of FP8 as closely as fp32 can tell may go to either, which moves
    its token by some thousandths: 0.2 tokens a run are expected to have one.
    """
    errors = [error(one, other) for one, other in zip(found, expected, strict=True)]
    assert sum(one > 1e-5 for one in errors) <= 2 and max(errors) < 0.02, sorted(errors)[-4:]


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_layers_are_those_of_transformers_with_rounded_experts(recipe, ranks, tmp_path):
    """Spread over two processes, too, and with the same bits on the host and over peers."""
    from mkd.config.models import TeacherConfig

    folder = make_model(tmp_path / "teacher", "qwen3_moe", **SIZES)
    settings = TeacherConfig(precision="fp8", fp8_recipe=recipe)
    expected, host, peers = expected_states(folder, recipe), dict(residency="host"), dict(residency="peers")
    ((plain, _, left),) = ranks.run(final_states, 1, folder, TeacherConfig())
    assert len(left) == 2 * 8, "products, experts"
    assert 1e-3 < error(plain, expected) < 0.1
    ((alone, same, left),) = ranks.run(final_states, 1, folder, settings, 1, 1, (host,))
    assert_tokens_agree(alone, expected)
    assert same == [True] and not left
    spread = ranks.run(final_states, 2, folder, settings, 2, 2, (host,))
    both = ranks.run(final_states, 2, folder, settings, 1, 1, (dict(peers, peers=2),))
    for found, same, left in (*spread, *both):
        assert_tokens_agree(found, expected)
        assert same == [True] and not left


@pytest.mark.parametrize("make", [fp8_blocks, mxfp4], ids=["FP8 blocks", "MXFP4"])
def test_stored_experts_compute_what_dequantised_ones_do(make, ranks, tmp_path):
    from mkd.config.models import TeacherConfig

    quantised, plain = make(tmp_path)
    ((expected, _, _),) = ranks.run(final_states, 1, plain, TeacherConfig())
    stored = TeacherConfig(precision="stored")
    ((dequantised, _, _),) = ranks.run(final_states, 1, quantised, TeacherConfig())
    assert error(dequantised, expected.double()) < 1e-6
    ((alone, same, left),) = ranks.run(final_states, 1, quantised, stored, 1, 1, (dict(residency="host"),))
    assert error(alone, expected.double()) < 1e-6 and same == [True] and not left
    for found, same, left in ranks.run(final_states, 2, quantised, stored, 2, 2, (dict(residency="host"),)):
        assert error(found, expected.double()) < 1e-6 and same == [True] and not left


def kept_blocks(folder, other):
    """Return whether a blockwise teacher keeps codes and scales of its file, and the error of another one."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.config.models import TeacherConfig
    from mkd.errors import MkdError
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.platform import detect
    from mkd.run.build_models import build_teacher_parts

    context, source = ParallelContext.create(detect()), source_of(folder)
    layout = PipelineLayout.even(source.shape.num_layers, 1)
    blockwise = TeacherConfig(precision="fp8", fp8_recipe="blockwise")
    (part,) = build_teacher_parts(source, blockwise, layout, ModelOptions(), context)
    experts, file = part.decoder.layers[2].mlp.experts, HFCheckpoint(folder)
    names = [f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up", "down")]
    everything = (slice(None), slice(None))
    parts = [file.read_codes(name, everything) for name in names]
    both = [torch.cat([gate, up]) for gate, up in zip(*parts[:2], strict=True)]
    found = []
    for stack, of_file in ((experts.first, both), (experts.second, parts[2])):
        own = stack.codes[5], stack.scales[5]
        found += [torch.equal(*pair) for pair in zip(own, of_file, strict=True)]
    try:
        build_teacher_parts(source_of(other), blockwise, layout, ModelOptions(), context)
    except MkdError as problem:
        return found, str(problem)
    return found, None


def test_blocks_of_a_file_stay_as_they_are(ranks, tmp_path):
    quantised, _ = fp8_blocks(tmp_path)
    other = with_other_experts(tmp_path / "other", quantised)
    ((found, problem),) = ranks.run(kept_blocks, 1, quantised, other)
    assert found == [True] * 4 and "is not quantised" in problem
