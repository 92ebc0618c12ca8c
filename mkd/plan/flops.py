"""Floating-point operations of the pair, for the MFU of a run. Padding and recomputation never count."""

from __future__ import annotations

from mkd.plan.model_shape import ModelShape


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters that multiply every token: projections, MLP and LM head (an embedding lookup is no multiplication)."""
    query = shape.num_attention_heads * shape.head_dim
    key_value = 2 * shape.num_query_groups * shape.head_dim
    attention = shape.hidden_size * (2 * query + key_value)
    mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    return shape.num_layers * (attention + mlp) + shape.hidden_size * shape.vocab_size


def forward_flops(shape: ModelShape, document_lengths: list[int]) -> int:
    """FLOPs of one forward pass over packed documents: 2 per parameter and token, plus causal attention.

    Attention of n tokens: QK^T and AV are 2 n^2 heads d FLOPs each, half of it under the causal mask.
    """
    tokens = sum(document_lengths)
    squares = sum(n * n for n in document_lengths)
    attention = 2 * shape.num_layers * shape.num_attention_heads * shape.head_dim * squares
    return 2 * matmul_parameters(shape) * tokens + attention


def distillation_flops(student: ModelShape, teacher: ModelShape | None, document_lengths: list[int]) -> int:
    """Student forward and backward (3 forwards' worth) and one teacher forward."""
    total = 3 * forward_flops(student, document_lengths)
    if teacher is not None:
        total += forward_flops(teacher, document_lengths)
    return total
