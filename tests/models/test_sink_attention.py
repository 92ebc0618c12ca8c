"""Check attention with sinks against a dense fp64 softmax."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from mkd.models.sink_attention import SinkAttention
from mkd.platform import detect
from tests.models.test_attention import DIM, HEADS, LENGTHS, SPANS, packed, random_qkv

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
