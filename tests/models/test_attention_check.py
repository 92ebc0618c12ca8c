"""The check of attention's gradients: right kernels pass; wrong and non-finite gradients are found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mkd.models.attention_check import LENGTHS, TOLERANCE, AttentionKind, attention_error, attention_kinds
from mkd.plan.models.model_shape import ModelShape
from tests.families.test_gemma4 import SIZES as GEMMA4
from tools.benchmarks.shapes import shape_of

CPU = torch.device("cpu")
KINDS = (AttentionKind(4, 2, 64, 64), AttentionKind(2, 2, 48, 32), AttentionKind(4, 1, 64, 64, window=100))


def core_of(kind: AttentionKind):
    """Return mkd's attention in bf16, document by document."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for parts in zip(*(one.split(LENGTHS) for one in (query, key, value)), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            place = torch.arange(q.size(2))
            seen = (place[:, None] >= place) & (place[:, None] - place < (kind.window or q.size(2)))
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0])
        return torch.cat([one.transpose(0, 1).flatten(1) for one in outputs])

    return run


class Wrong(torch.autograd.Function):
    """The identity, whose backward multiplies by a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.factor, None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_right_and_wrong_gradients(kind):
    core = core_of(kind)
    assert attention_error(core, kind, CPU) < TOLERANCE / 3
    for place in range(3):
        for factor, least in ((0.8, 0.19), (torch.nan, float("inf"))):

            def wrong(*inputs: Tensor, place=place, factor=factor) -> Tensor:
                return core(*(Wrong.apply(x, factor) if at == place else x for at, x in enumerate(inputs)))

            assert attention_error(wrong, kind, CPU) >= least


def test_kinds_are_those_of_the_layers_on_one_rank():
    assert [*attention_kinds(shape_of("qwen3-8b"), 2)] == [AttentionKind(16, 4, 128, 128)]
    assert [*attention_kinds(shape_of("qwen3.5-2b"), 4)] == [AttentionKind(4, 1, 256, 256)]
    deepseek = dict(
        model_type="deepseek_v3",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=64,
        vocab_size=100,
        first_k_dense_replace=2,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
    )
    assert [*attention_kinds(ModelShape.from_hf_config(deepseek), 2)] == [AttentionKind(4, 4, 192, 128)]
    # Gemma 4's layers without a window have wider heads, and mkd's attention already.
    assert [*attention_kinds(ModelShape.from_hf_config(GEMMA4), 1)] == [AttentionKind(8, 4, 256, 256, 512)]
