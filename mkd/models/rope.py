"""Rotary position embeddings of packed documents.

Frequencies are default, linear, Llama 3's, YaRN's, LongRoPE's, or Gemma 4's proportional ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkd.families.layer_shape import RopeShape
from mkd.models.packed import PackedDocuments
from mkd.parallel.zigzag import RowShard


def inverse_frequencies(rope: RopeShape, long_context: bool = False) -> Tensor:
    """Return the rotation per position of each channel pair, fp32 [rotary_dim / 2].

    Sources: RoPE (Su et al. 2021); linear interpolation (Chen et al. 2023); Llama 3's frequency bands (Meta
    2024, reference code of Llama 3.1); YaRN (Peng et al. 2023); LongRoPE (Ding et al. 2024), whose
    `long_context` factors apply to documents beyond the original length; proportional
    (transformers, `_compute_proportional_rope_parameters`), of which only the first pairs turn.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factor if long_context else rope.short_factor)
        return 1.0 / (factors * rope.theta**exponents)
    if rope.kind == "proportional":
        turns = torch.arange(len(frequencies)) < rope.turning_pairs
        return torch.where(turns, frequencies / rope.factor, 0.0)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeShape) -> Tensor:
    """Keep short wavelengths, divide long ones by `factor`, blend in between."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: RopeShape) -> Tensor:
    """Keep fast channel pairs, divide slow ones by `factor`, blend linearly by index in between."""
    original, dim = rope.original_max_position_embeddings, rope.rotary_dim

    def pair_with(turns: float) -> float:  # that makes so many full turns within the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    blend = ((torch.arange(dim // 2).float() - first) / width).clamp(0, 1)
    return blend * frequencies / rope.factor + (1 - blend) * frequencies


class RotaryEmbedding(nn.Module):
    """Angles of the positions of one pack, in the form that Megatron's attention expects.

    Megatron takes `cos` and `sin` of the angles. The `attention_factor` of YaRN and LongRoPE reaches them
    through the concentration factor of the transformer configuration (see `language_model.py`).
    """

    def __init__(self, rope: RopeShape, device: torch.device):
        super().__init__()
        self.rope = rope
        self.short = inverse_frequencies(rope).to(device)
        self.long = (
            inverse_frequencies(rope, long_context=True).to(device) if rope.kind == "longrope" else None
        )

    def forward(self, packed: PackedDocuments) -> Tensor:
        """Return angles in radians, fp32 [n, 1, 1, rotary_dim].

        n is the longest padded document, positions counted from 0; Megatron restarts them at every document.
        With LongRoPE the frequencies depend on the document's length, so n is the whole pack and each token
        has its own angles. From either form Megatron picks the rows that a context-parallel rank holds. So
        does a row of single tokens, whose positions are given; they are within the original length.
        """
        if packed.token_positions is not None:
            return self._angles(packed.token_positions, self.short)
        if self.long is None:
            return self._angles(torch.arange(packed.max_seqlen_q, device=self.short.device), self.short)
        lengths = packed.cu_seqlens_real.diff().tolist()
        spans = packed.cu_seqlens_q_padded.diff().tolist()
        angles = []
        for length, span in zip(lengths, spans, strict=True):
            frequencies = self.long if length > self.rope.original_max_position_embeddings else self.short
            angles.append(self._angles(torch.arange(span, device=self.short.device), frequencies))
        return torch.cat(angles)

    def _angles(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        half = torch.outer(positions.float(), frequencies)
        both = half.repeat_interleave(2, dim=-1) if self.rope.interleaved else torch.cat((half, half), dim=-1)
        return both[:, None, None, :]


class SectionedRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding whose channel pairs turn by one of three positions each: time, height or width.

    Source: Qwen2-VL (2024), section 2.1. Qwen3-VL's sections alternate over a head instead of following each
    other. Its layers have `RowRopeAttention`.
    """

    def __init__(self, rope: RopeShape, device: torch.device):
        super().__init__(rope, device)
        pairs = torch.arange(rope.rotary_dim // 2, device=device)
        if rope.interleaved_sections:
            turns = pairs % 3
            lengths = torch.tensor(rope.sections, device=device)
            self.turns_by = torch.where(pairs < 3 * lengths[turns], turns, 0)
        else:
            self.turns_by = torch.arange(3, device=device).repeat_interleave(
                torch.tensor(rope.sections, device=device)
            )

    def forward(self, packed: PackedDocuments) -> Tensor:
        """Return angles in radians, fp32 [t, 1, 1, rotary_dim], one for every row of this rank."""
        assert packed.positions is not None, "a model with sections gives its rows positions"
        half = packed.positions[self.turns_by].T.float() * self.short
        return torch.cat((half, half), dim=-1)[:, None, None, :]


class NoRotaryEmbedding(nn.Module):
    """In place of angles for a model whose attention does not see positions."""

    def forward(self, packed: PackedDocuments) -> None:
        return None


class LayerRotaryEmbeddings(nn.Module):
    """The rotary embeddings of a model whose layers have different ones, for `LayerRopeAttention`."""

    def __init__(self, ropes: Sequence[RopeShape], device: torch.device):
        super().__init__()
        assert all(rope.kind != "longrope" for rope in ropes), "the angles of LongRoPE have another shape"
        self.embeddings = nn.ModuleList(RotaryEmbedding(rope, device) for rope in ropes)

    def forward(self, packed: PackedDocuments) -> Tensor:
        """Return angles in radians, fp32 [embeddings, n, 1, 1, largest rotary_dim].

        n is the length of the longest padded document. Narrower embeddings are filled up with zeros.
        """
        angles = [embedding(packed) for embedding in self.embeddings]
        widest = max(one.size(-1) for one in angles)
        return torch.stack([F.pad(one, (0, widest - one.size(-1))) for one in angles])


def query_factors(
    ropes: Sequence[RopeShape],
    packed: PackedDocuments,
    num_tokens: int,  # t of this context-parallel process
    shard: RowShard,
) -> Tensor | None:
    """Return the factors of queries for a model whose queries grow, fp32 [t, 1, 1, 1].

    The factor at position p of a document is 1 + growth ln(1 + floor(p / original)), as in Llama 4 and
    Ministral 3 (source: transformers, `get_llama_4_attn_scale`). Return None if all are 1.
    """
    if not any(rope.query_growth for rope in ropes):
        return None
    (rope,) = ropes
    position = packed.token_positions
    if position is None:
        if packed.max_seqlen_q <= rope.original_max_position_embeddings:
            return None
        _, position = shard.places(packed.cu_seqlens_q_padded, num_tokens)
    turns = torch.floor(position.float() / rope.original_max_position_embeddings)
    return (1 + rope.query_growth * torch.log1p(turns))[:, None, None, None]


def rotary_embedding(ropes: Sequence[RopeShape], device: torch.device) -> nn.Module:
    """Return the rotary embedding of a model whose layers have these distinct ropes, maybe none."""
    if not ropes:
        return NoRotaryEmbedding()
    if len(ropes) > 1:
        return LayerRotaryEmbeddings(ropes, device)
    return (SectionedRotaryEmbedding if ropes[0].sections else RotaryEmbedding)(ropes[0], device)
