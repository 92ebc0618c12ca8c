"""Floating-point operations of student and teachers, for the MFU of a run.

Padding and recomputation never count. Of routed experts only those of a token count (active parameters).
"""

from __future__ import annotations

from collections.abc import Sequence

from mkd.families.layer_shape import LayerShape, MoEShape
from mkd.families.mixer_shape import MixerShape
from mkd.plan.models.model_shape import ModelShape

SCAN_CHUNK = 64
"""Tokens of a chunk of a mixer's recurrence, in mkd's scan and in the kernels of others."""


def projection_parameters(shape: ModelShape, layer: LayerShape, tensor_parallel: int = 1) -> int:
    """Count the matrix elements of one layer's attention or mixer on one process."""
    if not layer.mixes_tokens:
        return 0
    if layer.mixer is not None:
        channels = layer.mixer.projected_width + layer.mixer.output_width
        return shape.hidden_size * channels // tensor_parallel
    shape = shape.for_layer(layer)
    groups = shape.padded_query_groups(tensor_parallel) // tensor_parallel
    heads, hidden, mla = groups * shape.heads_per_group, shape.hidden_size, layer.mla
    if mla is None:
        of_groups = (2 - layer.shared_key_value) * groups
        return hidden * ((2 + layer.output_gate) * heads + of_groups) * shape.head_dim
    per_head = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.v_head_dim * hidden
    per_head += mla.qk_head_dim * (mla.q_lora_rank or hidden)
    latents = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)  # replicated over TP
    return heads * per_head + hidden * latents


def layer_matmul_parameters(shape: ModelShape, layer: LayerShape) -> int:
    """Count the parameters of a decoder layer that multiply a token.

    They are the projections of attention or mixer, and the MLP. In a layer with experts they are the router
    and the MLPs of a token: shared ones and its `top_k` experts.
    """
    return projection_parameters(shape, layer) + mlp_parameters(shape, layer)


def mlp_parameters(shape: ModelShape, layer: LayerShape) -> int:
    """Count the matrix elements that multiply a token behind a layer's attention."""
    if layer.moe is not None:
        return layer.moe.matrix_elements(shape.hidden_size, layer.moe.top_k)
    return shape.hidden_size * layer.mlp_matrices * layer.ffn_hidden_size


def expert_parameters(shape: ModelShape, moe: MoEShape) -> int:
    """Count the parameters of one expert."""
    hidden, ffn = moe.expert_width(shape.hidden_size), moe.ffn_hidden_size
    return moe.mlp_matrices * hidden * ffn + moe.biases * ((moe.mlp_matrices - 1) * ffn + hidden)


def matmul_parameters(shape: ModelShape) -> int:
    """Count the parameters of all decoder layers that multiply a token."""
    return sum(layer_matmul_parameters(shape, layer) for layer in shape.layers)


def layer_mixing_flops(shape: ModelShape, layer: LayerShape, tokens: int, squared_lengths: int) -> int:
    """Count the forward FLOPs between the projections of one layer: of causal attention, or of its mixer.

    `squared_lengths` is the sum of n^2 over documents of n tokens. QK^T and AV are 2 n^2 heads d FLOPs each,
    half of it under the causal mask. A sliding window is not subtracted. A mixer's FLOPs do not depend on the
    length of documents.
    """
    if not layer.mixes_tokens:
        return 0
    if layer.mixer is not None:
        return tokens * _recurrence_flops(layer.mixer)
    shape = shape.for_layer(layer)
    return shape.num_attention_heads * (shape.head_dim + shape.value_dim) * squared_lengths


def _recurrence_flops(mixer: MixerShape) -> int:
    """Count the FLOPs of a token in the convolution and in the chunked recurrence.

    Two products with the state count, and in a chunk scores times values, and q k^T of every block. With
    corrections, a third product with the state, k k^T, and the solution of a triangular system for keys and
    values; q k^T is then of every head. Chunks are whole, without regard to the causal mask.
    """
    keys, values, scored = mixer.key_dim, mixer.value_dim, mixer.blocks
    of_head = 4 * keys * values + SCAN_CHUNK * 2 * values
    if mixer.has_corrections:
        of_head += 2 * keys * values + SCAN_CHUNK * (4 * keys + 2 * values)
        scored = mixer.heads
    convolution = 2 * mixer.kernel_size * mixer.convolved_width
    return mixer.heads * of_head + scored * SCAN_CHUNK * 2 * keys + convolution


def forward_flops(shape: ModelShape, document_lengths: Sequence[int]) -> int:
    """Count the FLOPs of one forward pass over packed documents.

    They are 2 per parameter and token, plus causal attention and mixers. The LM head counts (it multiplies
    every token), an embedding lookup does not.
    """
    parameters = matmul_parameters(shape) + shape.hidden_size * shape.vocab_size
    tokens, squared = sum(document_lengths), sum(n * n for n in document_lengths)
    mixing = sum(layer_mixing_flops(shape, layer, tokens, squared) for layer in shape.layers)
    return 2 * parameters * tokens + mixing


def distillation_flops(
    student: ModelShape,
    teachers: Sequence[ModelShape],
    document_lengths: Sequence[int],
    # For each teacher; None if it reads the student's tokens.
    teacher_lengths: Sequence[Sequence[int] | None] | None = None,
    is_frozen: bool = False,
) -> int:
    """Count the FLOPs of the student's step (3 forwards) and of one forward of each teacher.

    If the student's weights are frozen (`is_frozen`), the products that make their gradients are left out.
    Its adapters do not count: they take some percent.
    """
    total = 3 * forward_flops(student, document_lengths)
    if is_frozen:
        weights = matmul_parameters(student) + student.hidden_size * student.vocab_size
        total -= 2 * weights * sum(document_lengths)
    for shape, own in zip(teachers, teacher_lengths or [None] * len(teachers), strict=True):
        total += forward_flops(shape, document_lengths if own is None else own)
    return total
