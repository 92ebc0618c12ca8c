"""Check rotary frequencies against transformers, and angles that restart at every document."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mkd.errors import UsageError
from mkd.families.layer_shape import RopeShape
from mkd.families.rope_config import read_rope
from mkd.models import attention
from mkd.models.packed import packed_documents
from mkd.models.rope import LayerRotaryEmbeddings, RotaryEmbedding, inverse_frequencies
from mkd.parallel.context import ParallelContext
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect
from tests.kinds.sampled.decoded import packed_scores
from tests.tiny_models import LLAMA3_ROPE, LONG_ROPE, YARN, make_model

HEAD_DIM = 16
LONG = {**LONG_ROPE, "factor": 4.0}  # 16 * 0.75 = 12 rotated channels: 6 factors
SCALED = {
    "linear": dict(rope_type="linear", rope_theta=5000.0, factor=3.0),
    "llama3": LLAMA3_ROPE,
    "longrope": LONG,
    "yarn": YARN,
    "yarn without rounding": YARN | dict(truncate=False, beta_slow=0.3),
    "yarn, DeepSeek's scales": YARN | dict(mscale=0.9, mscale_all_dim=0.5),
    "yarn, own factor": YARN | dict(attention_factor=1.7, original_max_position_embeddings=40),
}


def config_of(rope):
    sizes = dict(hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=128)
    sizes["rope_parameters"] = dict(rope)
    # Phi-3's own key of the original context takes precedence over that of rope_parameters; so does that of
    # the rotated fraction with transformers 5.0
    if rope["rope_type"] == "longrope":
        sizes |= dict(
            original_max_position_embeddings=32, partial_rotary_factor=rope["partial_rotary_factor"]
        )
        return transformers.Phi3Config(**sizes, pad_token_id=0)
    return transformers.LlamaConfig(**sizes)


def packed(lengths, spans):
    real, padded = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, spans))
    return packed_documents(real, padded, max(spans))


def rope_of(kind):
    config = config_of(SCALED[kind])
    return read_rope(config.to_dict(), HEAD_DIM, is_partial=config.model_type == "phi3")


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_frequencies_equal_transformers(kind):
    """32 tokens fit the original context of the scaled kinds, 100 do not."""
    rope = rope_of(kind)
    assert rope.kind == SCALED[kind]["rope_type"]
    for tokens in (32, 100):
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](
            config_of(SCALED[kind]), torch.device("cpu"), seq_len=tokens
        )
        ours = inverse_frequencies(rope, long_context=kind == "longrope" and tokens > 32)
        assert ours.dtype == torch.float32 and ours.shape == (rope.rotary_dim // 2,)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_default_frequencies():
    rope = RopeShape(theta=10000.0, rotary_dim=8)
    torch.testing.assert_close(inverse_frequencies(rope), torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    plain = inverse_frequencies(RopeShape(theta=10000.0, rotary_dim=HEAD_DIM))
    scaled = inverse_frequencies(rope_of("llama3"))
    assert scaled[0] == plain[0] and scaled[-1] == plain[-1] / 8
    assert ((plain / 8 <= scaled) & (scaled <= plain)).all()


def test_angles_count_from_0_to_the_longest_document():
    rope = RopeShape(theta=10000.0, rotary_dim=8)
    angles = RotaryEmbedding(rope, torch.device("cpu"))(packed((3, 5), (4, 7)))
    assert angles.shape == (7, 1, 1, 8) and angles.dtype == torch.float32
    frequencies = inverse_frequencies(rope)
    expected = torch.arange(7.0)[:, None] * torch.cat([frequencies, frequencies])
    assert torch.equal(angles[:, 0, 0], expected)


def test_longrope_takes_each_document_by_its_own_length():
    """33 real tokens exceed the original context (32); 32 with padding beyond it do not.

    Each token has its own angles.
    """
    rope = rope_of("longrope")
    lengths, spans = (32, 33, 4), (36, 33, 11)
    angles = RotaryEmbedding(rope, torch.device("cpu"))(packed(lengths, spans))[:, 0, 0]
    assert angles.shape == (sum(spans), rope.rotary_dim)
    short, long = inverse_frequencies(rope), inverse_frequencies(rope, long_context=True)
    assert not torch.equal(short, long)
    for document, frequencies, span in zip(angles.split(spans), (short, long, short), spans, strict=True):
        expected = torch.arange(span).float()[:, None] * torch.cat([frequencies, frequencies])
        assert torch.equal(document, expected)


def rotate_my_rows(rope, lengths, spans):
    """Return True if Megatron rotates this rank's rows by the angles of the whole pack, as without CP."""
    context = ParallelContext.create(detect(), Sizes(context=torch.distributed.get_world_size()))
    documents = packed(lengths, spans)
    angles = RotaryEmbedding(rope, context.device)(documents)
    config = TransformerConfig(num_layers=1, hidden_size=HEAD_DIM, num_attention_heads=1)
    whole = torch.randn(sum(spans), 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rows = context.row_shard.rows(documents.cu_seqlens_q_padded)
    # one process in each tp group
    mine, expected = (
        apply_rotary_pos_emb(x, angles, config, documents.cu_seqlens_q_padded, cp_group=group)
        for x, group in ((whole[rows], context.groups.cp), (whole, context.groups.tp))
    )
    return torch.equal(mine, expected[rows])


@pytest.mark.parametrize("kind", ["llama3", "longrope"])
@pytest.mark.parametrize(("lengths", "spans"), [((33, 4, 30), (40, 8, 32)), ((40,), (80,))])
def test_context_parallel_ranks_rotate_by_position_in_the_document(kind, lengths, spans, ranks):
    assert ranks.run(rotate_my_rows, 4, rope_of(kind), lengths, spans) == [True] * 4


def test_another_kind_is_refused():
    with pytest.raises(UsageError) as error:
        read_rope({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, HEAD_DIM)
    assert error.value.code == "model-feature-not-supported" and "dynamic" in error.value.what


def test_layers_with_different_embeddings_each_take_their_own():
    ropes = (RopeShape(theta=1e4, rotary_dim=8), RopeShape(1e6, 8, "linear", factor=8.0))
    documents = packed((3, 5), (4, 7))
    both = LayerRotaryEmbeddings(ropes, torch.device("cpu"))(documents)
    for rope, angles in zip(ropes, both, strict=True):
        assert torch.equal(angles, RotaryEmbedding(rope, torch.device("cpu"))(documents))


def scores_without_strides(folder):
    """Return ln p of some tokens, and the same with a rotation that takes angles for contiguous memory."""
    turn, pairs = attention.apply_rotary_pos_emb, [(np.arange(1, 20), [3, 5, 8, 13])]

    def ignores_strides(rows, angles, *given, **named):
        sizes = angles.shape
        contiguous = angles.as_strided(sizes, torch.empty(sizes, device="meta").stride())
        return turn(rows, contiguous, *given, **named)

    expected = packed_scores(folder, pairs)
    parallel_state.destroy_model_parallel()
    with patch.object(attention, "apply_rotary_pos_emb", ignores_strides):
        return expected, packed_scores(folder, pairs)


def test_kernels_that_ignore_strides_read_the_angles_of_narrow_heads(tmp_path, ranks):
    """As that of Transformer Engine. Angles of Gemma 4's narrow and wide heads lie in one tensor."""
    ((expected, found),) = ranks.run(scores_without_strides, 1, make_model(tmp_path / "gemma4", "gemma4"))
    assert np.array_equal(expected, found)
