"""Attention on a GPU: what trains a model has the right gradients, whatever cuDNN is loaded."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mkd.models.attention import PackedAttention
from mkd.models.attention_check import (
    LENGTHS,
    TOLERANCE,
    AttentionKind,
    attention_error,
    cudnn_version,
    transformer_engine_attention,
)
from mkd.models.packed import packed_documents
from tests.train.invariance import SINGLE, make_pair, run_layout

pytestmark = pytest.mark.gpu
KINDS = (
    AttentionKind(8, 2, 64, 64),
    AttentionKind(8, 2, 128, 128),
    AttentionKind(8, 2, 256, 256),
    AttentionKind(8, 8, 256, 256, window=128),
    AttentionKind(8, 8, 192, 128),
)


def mkds_attention(kind: AttentionKind, device: torch.device):
    """Return the attention that replaces Transformer Engine's."""
    window = (kind.window - 1, 0) if kind.window else None
    config = SimpleNamespace(
        window_size=window, window_attn_skip_freq=None, deterministic_mode=False, context_parallel_size=1
    )
    module = PackedAttention(config, 1, None, "self")
    borders = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=device)
    packed = packed_documents(borders, borders, max(LENGTHS))
    return lambda q, k, v: module(q, k, v, None, packed_seq_params=packed)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_of_both_attentions(kind):
    """Transformer Engine's must be right up to 128 channels; above, the check decides."""
    device = torch.device("cuda")
    own = attention_error(mkds_attention(kind, device), kind, device)
    engines = attention_error(transformer_engine_attention(kind, device), kind, device)
    print(kind, f"mkd {own:.2e}, Transformer Engine with cuDNN {cudnn_version()} {engines:.2e}")
    assert own < TOLERANCE / 3
    assert engines < TOLERANCE / 3 or kind.channels > 128


def test_heads_of_256_channels_are_trained_rightly(gpu_ranks, tmp_path):
    """The gradients of a step in bf16 against those in fp32, where mkd computes attention without cuDNN."""
    student, teacher = make_pair(tmp_path, dict(head_dim=256, hidden_size=128))
    for name, flags in (("fp32", ()), ("bf16", ("--bf16",))):
        gpu_ranks.run(run_layout, 1, SINGLE.with_flags(flags), student, teacher, tmp_path / name)
    wide, half = (load_file(tmp_path / name / "gradients" / "model.safetensors") for name in ("fp32", "bf16"))
    for name, exact in wide.items():
        cosine = torch.cosine_similarity(exact.double().flatten(), half[name].double().flatten(), dim=0)
        assert cosine > 0.99, (name, float(cosine))
