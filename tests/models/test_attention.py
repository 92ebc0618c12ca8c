"""Check packed attention against a dense fp64 softmax: causality, borders, groups, windows, padding, CP."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from mkd.models.attention import PackedAttention
from mkd.models.packed import packed_documents
from mkd.parallel.context import ParallelContext
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect

# Megatron's own default
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

HEADS, DIM = 4, 8
# a document with padding, one of a single token, the last with the pack's tail
LENGTHS, SPANS = (5, 1, 9), (6, 1, 13)


def packed(lengths=LENGTHS, spans=SPANS):
    real, padded = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, spans))
    return packed_documents(real, padded, max(spans))


def attention(window=None, scale=None, deterministic=False):
    window_size = None if window is None else (window - 1, 0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        window_size=window_size,
        deterministic_mode=deterministic,
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=scale)


def random_qkv(groups, seed=0, spans=SPANS, value_dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(spans), *sizes) for sizes in ((HEADS, DIM), (groups, DIM), (groups, value_dim))]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]


def dense(query, key, value, window=None, scale=None, lengths=LENGTHS, spans=SPANS):
    """Return a softmax over the whole pack with one mask, [t, heads * d]; padding rows are zero."""
    t = query.size(0)
    document, is_real = torch.full((t,), -1), torch.zeros(t, dtype=torch.bool)
    start = 0
    for index, (length, span) in enumerate(zip(lengths, spans, strict=True)):
        document[start : start + span] = index
        is_real[start : start + length] = True
        start += span
    distance = torch.arange(t)[:, None] - torch.arange(t)[None, :]
    visible = (distance >= 0) & (document[:, None] == document[None, :]) & is_real[None, :]
    if window is not None:
        visible &= distance < window
    key, value = (x.repeat_interleave(HEADS // x.size(1), dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or 1 / math.sqrt(DIM))
    weights = torch.nan_to_num(scores.masked_fill(~visible, -math.inf).softmax(-1))
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1) * is_real[:, None]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3, 9, 100])
@pytest.mark.parametrize(
    "scale, deterministic, value_dim", [(None, False, DIM), (0.5, False, 5), (None, True, 11)]
)
def test_output_and_gradients_equal_dense_attention(groups, window, scale, deterministic, value_dim):
    ours, theirs = (random_qkv(groups, value_dim=value_dim) for _ in range(2))
    output = attention(window, scale, deterministic)(*ours, None, packed_seq_params=packed())
    expected = dense(*theirs, window, scale)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=0, atol=1e-12)


def test_padding_gives_zeros_and_takes_no_gradient_even_where_it_is_nan():
    query, key, value = random_qkv(2)
    is_padding = torch.zeros(sum(SPANS), dtype=torch.bool)
    is_padding[[5, *range(16, 20)]] = True
    with torch.no_grad():
        for tensor in (query, key, value):
            tensor[is_padding] = math.nan
    output = attention()(query, key, value, None, packed_seq_params=packed())
    output.sum().backward()
    assert output.isfinite().all() and not output[is_padding].any()
    for tensor in (query, key, value):
        assert tensor.grad.isfinite().all() and not tensor.grad[is_padding].any()


def test_documents_do_not_see_each_other():
    """A document's output is bitwise the same, whatever its neighbours hold."""
    first, second = random_qkv(2, seed=1), random_qkv(2, seed=2)
    mixed = [torch.cat([b[:7], a[7:]]) for a, b in zip(first, second, strict=True)]
    outputs = [attention()(*qkv, None, packed_seq_params=packed()) for qkv in (first, mixed)]
    assert torch.equal(outputs[0][7:], outputs[1][7:])
    assert not torch.equal(outputs[0][:5], outputs[1][:5])


def test_a_pack_without_tokens_gives_zeros():
    """Packs without tokens fill up the last step of an evaluation."""
    query, key, value = random_qkv(2)
    output = attention()(query, key, value, None, packed_seq_params=packed((0,), (sum(SPANS),)))
    assert output.shape == (sum(SPANS), HEADS * DIM) and not output.any()
    output.sum().backward()
    assert not query.grad.any()


# multiples of 8, for up to 4 context-parallel ranks
LONG_LENGTHS, LONG_SPANS = (5, 1, 23, 0, 16), (8, 8, 24, 8, 16)


def attend_my_rows(groups, window, lengths, spans, value_dim):
    """Return outputs of this rank's rows of a pack, and the gradients of its rows of query, key and value."""
    size = torch.distributed.get_world_size()
    context = ParallelContext.create(detect(), Sizes(context=size))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        window_size=None if window is None else (window - 1, 0),
        context_parallel_size=size,
    )
    documents = packed(lengths, spans)
    rows = context.row_shard.rows(documents.cu_seqlens_q_padded)
    whole = random_qkv(groups, spans=spans, value_dim=value_dim)
    mine = [x.detach()[rows].requires_grad_() for x in whole]
    core = PackedAttention(config, 1, AttnMaskType.causal, "self", pg_collection=context.groups)
    output = core(*mine, None, packed_seq_params=documents)
    (output * output_weight(spans, value_dim)[rows]).sum().backward()
    return [rows, *(x.detach() for x in (output, *(x.grad for x in mine)))]


def output_weight(spans, value_dim):
    return torch.randn(
        sum(spans), HEADS * value_dim, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )


def assert_ranks_equal_dense(ranks, size, groups, window, lengths, spans, value_dim=DIM):
    qkv = random_qkv(groups, spans=spans, value_dim=value_dim)
    expected = dense(*qkv, window, lengths=lengths, spans=spans)
    (expected * output_weight(spans, value_dim)).sum().backward()
    for rows, *ours in ranks.run(attend_my_rows, size, groups, window, lengths, spans, value_dim):
        for mine, whole in zip(ours, (expected.detach(), *(x.grad for x in qkv)), strict=True):
            torch.testing.assert_close(mine, whole[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("groups", "window", "value_dim"), [(4, None, 5), (2, None, DIM), (2, 3, DIM), (1, 9, 12)]
)
def test_context_parallel_ranks_together_equal_dense_attention(size, groups, window, value_dim, ranks):
    """Outputs and gradients of each rank's rows are those of the whole pack: none is lost or doubled."""
    assert_ranks_equal_dense(ranks, size, groups, window, LONG_LENGTHS, LONG_SPANS, value_dim)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_hold_only_padding_take_part_in_backward(size, ranks):
    """A document of 5 tokens in a pack of 64 lies on rank 0 alone; the others must not keep it waiting."""
    assert_ranks_equal_dense(ranks, size, 2, None, (5,), (64,))
