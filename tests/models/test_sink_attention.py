"""Check attention with sinks: against a dense fp64 softmax, and a whole block against GPT-OSS's."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module

from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.models.rope import RotaryEmbedding
from mkd.models.sink_attention import SinkAttention
from mkd.models.specs import LOCAL, layer_spec
from mkd.models.transformer_config import ModelOptions, transformer_config
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape
from mkd.platform import detect
from tests.models.test_attention import DIM, HEADS, LENGTHS, SPANS, packed, random_qkv
from tests.models.test_hf_parity import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)


def attention(window=None, dtype=torch.float64):
    detect()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        window_size=None if window is None else (window - 1, 0),
        params_dtype=dtype,
    )
    core = SinkAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.4)
    core.softmax_offset.data.copy_(SINKS)
    return core


def dense(query, key, value, sinks, window):
    """Return a softmax over the whole pack and a sink in fp64, [t, heads * d]; padding rows are zero."""
    t, starts = query.size(0), [0, *torch.tensor(SPANS).cumsum(0).tolist()]
    visible, is_real = torch.zeros(t, t, dtype=torch.bool), torch.zeros(t, dtype=torch.bool)
    for start, length in zip(starts, LENGTHS, strict=False):
        part = slice(start, start + length)
        visible[part, part] = torch.ones(length, length).tril().triu(1 - (window or t)).bool()
        is_real[part] = True
    key, value = (x.repeat_interleave(HEADS // x.size(1), dim=1) for x in (key, value))
    scores = (torch.einsum("qhd,khd->hqk", query, key) * 0.4).masked_fill(~visible, -math.inf)
    weights = torch.cat((scores, sinks[:, None, None].expand(-1, t, 1)), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1) * is_real[:, None]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_output_and_gradients_equal_a_dense_softmax(groups, window):
    core, ours, theirs = attention(window), random_qkv(groups), random_qkv(groups)
    sinks = SINKS.clone().requires_grad_()
    expected = dense(*theirs, sinks, window)
    output = core(*ours, None, packed_seq_params=packed())
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, reference in zip((*ours, core.softmax_offset), (*theirs, sinks), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=0, atol=1e-12)
    assert core.softmax_offset.grad.abs().min() > 1e-3


def real_rows():
    """Return True for the real tokens of the pack, bool [t]."""
    return torch.cat([torch.arange(span) < n for n, span in zip(LENGTHS, SPANS, strict=True)])


@pytest.mark.parametrize("window", [None, 3])
def test_one_call_for_the_whole_pack_gives_the_same(window):
    """GPUs take this way. On the CPU flex_attention has no backward, so only sinks have a gradient here."""
    core, qkv, sinks = attention(window), [x.detach() for x in random_qkv(2)], SINKS.clone().requires_grad_()
    output, expected = core.whole_pack(*qkv, packed()), dense(*qkv, sinks, window)
    output, expected = output[real_rows()], expected[real_rows()]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for result in (output, expected):
        (result * weight).sum().backward()
    torch.testing.assert_close(core.softmax_offset.grad, sinks.grad, rtol=0, atol=1e-5)


def whole_pack_on_gpu(window, dtype, heads, groups, dim):
    """Return output, gradients and sinks of one call on the GPU, and of one call for each document."""
    platform, lengths, spans = detect(), (700, 1, 1300), (700, 40, 1308)
    size = dict(num_layers=1, hidden_size=heads * dim, num_attention_heads=heads)
    window_size = None if window is None else (window - 1, 0)
    config = TransformerConfig(**size, window_size=window_size, params_dtype=dtype)
    results = []
    for whole in (True, False):
        core = SinkAttention(config, 1, AttnMaskType.causal, "self").to(platform.device)
        generator = torch.Generator().manual_seed(0)
        core.softmax_offset.data.copy_(torch.randn(heads, generator=generator))
        qkv = [torch.randn(sum(spans), n, dim, generator=generator) for n in (heads, groups, groups)]
        qkv = [x.to(platform.device, dtype if whole else torch.float32).requires_grad_() for x in qkv]
        documents = packed(lengths, spans)
        if whole:
            output = core(*qkv, None, packed_seq_params=documents)
        else:
            core.float()
            output = super(SinkAttention, core).forward(*qkv, None, packed_seq_params=documents)
        real = torch.cat([torch.arange(span) < n for n, span in zip(lengths, spans, strict=True)])
        weight = torch.randn(output.shape, generator=generator) * real[:, None]
        (output * weight.to(output)).sum().backward()
        tensors = (output * real[:, None].to(output), *(x.grad for x in (*qkv, core.softmax_offset)))
        results.append([x.detach().float().cpu() for x in tensors])
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_whole_pack_on_a_gpu(window, dtype, tolerance, gpu_ranks):
    """GPT-OSS's heads: 64 channels, 8 queries to a key."""
    ((whole, apart),) = gpu_ranks.run(whole_pack_on_gpu, 1, window, dtype, 16, 2, 64)
    for name, mine, reference in zip(("output", "q", "k", "v", "sinks"), whole, apart, strict=True):
        error = float((mine - reference).norm() / reference.norm())
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


GPT_OSS = dict(
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    num_hidden_layers=2,
    sliding_window=6,
    max_position_embeddings=512,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=150.0, factor=32.0, beta_fast=3.0, beta_slow=0.4, truncate=False,
        original_max_position_embeddings=16,
    ),
)  # fmt: skip
BLOCK_LENGTHS, PADDING = (9, 1, 22), 8


def gpt_oss_shape():
    rope = read_rope(GPT_OSS, 8)
    layer = LayerShape(96, rope, qkv_bias=True, attention_output_bias=True, attention_sinks=True)
    windowed = LayerShape(**{**vars(layer), "sliding_window": 6})
    return ModelShape("llama", (windowed, layer), 48, 6, 3, 8, 307, 512, 1e-5)


def block_on_my_rank(tensors, hidden, weight, tp, sequence_parallel, index):
    """Return output, gradient of the input and gradients of one attention, by Hugging Face tensor."""
    from mkd.checkpoint.hf.hf_names import find_map

    context, shape = ParallelContext.create(detect(), tensor_parallel=tp), gpt_oss_shape()
    options = ModelOptions(sequence_parallel=sequence_parallel)
    config = transformer_config(shape, PipelineLayout.even(2, 1), options, context)
    rope = shape.common("rope")
    config.yarn_rotary_scaling_factor = math.exp((rope.attention_factor - 1.0) / 0.1)
    spec = layer_spec(shape.layers[index], LOCAL, None).submodules.self_attention
    block = build_module(spec, config=config, layer_number=index + 1, pg_collection=context.groups)
    pieces = {}
    for name, parameter in block.named_parameters():
        found = find_map(shape, f"decoder.layers.{index}.self_attention.{name}", 0)
        assert found.fits(tuple(parameter.shape), tp)
        parameter.data.zero_()
        pieces[name] = found.pieces(tuple(parameter.shape), context.tp_rank, tp)
        for piece in pieces[name]:
            piece.in_shard(parameter.data).copy_(piece.in_tensor(tensors[piece.tensor]))
    rows = slice(None)
    if sequence_parallel:
        share = hidden.size(0) // tp
        rows = slice(context.tp_rank * share, (context.tp_rank + 1) * share)
    mine = hidden[rows].clone().requires_grad_()
    documents = pack(BLOCK_LENGTHS, PADDING)
    angles = RotaryEmbedding(rope, context.device)(documents)
    output, bias = block(mine, None, rotary_pos_emb=angles, packed_seq_params=documents)
    output = output if bias is None else output + bias
    (output * weight[rows]).sum().backward()
    grads = {
        (piece.tensor, piece.tensor_start): (piece, piece.in_shard(parameter.grad).clone(), parameter.grad)
        for name, parameter in block.named_parameters()
        for piece in pieces[name]
    }
    return output.detach(), mine.grad, {key: value[:2] for key, value in grads.items()}


def reference_block(index):
    """Return transformers' attention of layer `index`, its inputs, output and gradients."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss import modeling_gpt_oss

    torch.manual_seed(index)
    config = GptOssConfig(**GPT_OSS, attn_implementation="eager")
    attention = modeling_gpt_oss.GptOssAttention(config, index)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    rotary = modeling_gpt_oss.GptOssRotaryEmbedding(config)
    hidden = torch.randn(sum(BLOCK_LENGTHS) + PADDING, 1, 48)
    weight = torch.randn(sum(BLOCK_LENGTHS) + PADDING, 1, 48)
    weight[sum(BLOCK_LENGTHS) :] = 0
    leaf, outputs = hidden.clone().requires_grad_(), []
    for document in leaf[: sum(BLOCK_LENGTHS), 0].split(BLOCK_LENGTHS):
        n = document.size(0)
        window = GPT_OSS["sliding_window"] if attention.sliding_window else n
        visible = torch.ones(n, n).tril().triu(1 - window).bool()
        mask = torch.zeros(n, n).masked_fill(~visible, -math.inf)[None, None]
        outputs.append(attention(document[None], rotary(document[None], torch.arange(n)[None]), mask)[0][0])
    output = torch.cat(outputs)
    (output * weight[: sum(BLOCK_LENGTHS), 0]).sum().backward()
    prefix = f"model.layers.{index}.self_attn."
    tensors = {prefix + name: one.detach() for name, one in attention.named_parameters()}
    grads = {prefix + name: one.grad for name, one in attention.named_parameters()}
    return hidden, weight, tensors, output.detach(), leaf.grad, grads


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("index", [0, 1], ids=["window", "full"])
def test_a_block_equals_transformers(index, tp, sequence_parallel, ranks):
    """Values and gradients, sinks included; 3 groups of heads are padded to 4 at TP 2."""
    hidden, weight, tensors, expected, input_grad, grads = reference_block(index)
    results = ranks.run(block_on_my_rank, tp, tensors, hidden, weight, tp, sequence_parallel, index)
    output, mine = ([one[part] for one in results] for part in (0, 1))
    output = torch.cat(output) if sequence_parallel else output[0]
    mine = torch.cat(mine) if sequence_parallel else mine[0]
    assert error_of(output[: len(expected), 0], expected) <= 1e-5
    assert error_of(mine, input_grad) <= 1e-5
    found = {}
    for _, _, pieces in results:
        for key, (piece, gradient) in pieces.items():
            is_sum = piece.tensor.endswith("o_proj.bias") and sequence_parallel  # of each rank's tokens
            found[key] = (piece, gradient + found[key][1] if is_sum and key in found else gradient)
    assert {piece.tensor for piece, _ in found.values()} == grads.keys()
    for piece, gradient in found.values():
        reference = piece.in_tensor(grads[piece.tensor])
        scale = grads[piece.tensor].abs().max()
        assert (gradient - reference).abs().max() <= 1e-5 * scale, piece.tensor


def error_of(found, expected) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
