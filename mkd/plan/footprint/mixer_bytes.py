"""The memory of a mixer in torch (mkd/models/mixers), in bytes a token of all heads.

With n heads of keys dk and values dv, K blocks, c channels of a convolution over k tokens and chunks of C
tokens, autograd keeps, e being the bytes of an activation,

    convolution    each of its k inputs and its sum: (k + 1) c e
    recurrence     fp32: forms of queries and keys n dk, and of values n dv; matrices n C of pairs; a state
                   n dk dv for each chunk
    numbers        fp32 of a head: decays, strengths and statistics; C bytes of masks

A gated delta net keeps queries and keys before they have length 1, 4 (2 K dk), and in the recurrence nine
forms of n dk, three of n dv, the solution n (dk + dv) and five matrices. The gated norm keeps three forms of
n dv in fp32 and two of e bytes. It has ten numbers.

Mamba-2 keeps two forms of n dk, seven of n dv with the gated norm, two matrices, and eight numbers. For its
blocks it keeps four forms of K dk and a matrix K C; in fp32 also the activated sum of the convolution, c e.

Measured with `saved_tensors_hooks` on torch 2.13: see tests/plan/footprint/test_mixer_bytes.py. The fused
kernels of a gated delta net (fla-core 0.6) keep, all with e bytes,

    convolution    its input c
    recurrence     q and k with length 1: 2 K dk; values n dv; the inverse of each chunk's system n C
    gated norm     input and gate: 2 n dv
    numbers        for a block two fp32 and for a head five, and e bytes

They compute states and updates again in backward, where the states before all chunks, n dk dv / C, live with
their gradients. What fused kernels keep and hold was counted in Triton's interpreter, where all tensors are
torch's (2 and 4 heads of 128 channels in bf16): the kept bytes are exact.
"""

from __future__ import annotations

from mkd.families.mixer_shape import MixerShape
from mkd.plan.models.flops import SCAN_CHUNK


def mixer_bytes(mixer: MixerShape, element: int, is_fused: bool = False) -> int:
    """Return the bytes that one token keeps between the projections; `element` is that of an activation."""
    heads, keys, values = mixer.heads, mixer.key_dim, mixer.value_dim
    if is_fused:
        channels = mixer.convolved_width + 2 * mixer.blocks * keys + heads * (3 * values + SCAN_CHUNK)
        return channels * element + 4 * 2 * mixer.blocks + heads * (4 * 5 + element)
    convolution = (mixer.kernel_size + 1) * mixer.convolved_width * element
    state = keys * values // SCAN_CHUNK
    if mixer.has_corrections:
        before = 4 * 2 * mixer.blocks * keys
        recurrence = 4 * heads * (10 * keys + 3 * values + 5 * SCAN_CHUNK + state)
        recurrence += heads * values * (3 * 4 + 2 * element)
        numbers = 10
    else:
        before = mixer.convolved_width * element if element == 4 else 0
        recurrence = 4 * heads * (2 * keys + 7 * values + 2 * SCAN_CHUNK + state)
        recurrence += 4 * mixer.blocks * (4 * keys + SCAN_CHUNK)
        numbers = 8
    return convolution + before + recurrence + 4 * numbers * heads + SCAN_CHUNK


def mixer_forward_bytes(mixer: MixerShape, element: int, is_fused: bool) -> int:
    """Return the bytes of a token at the peak of a forward without gradients.

    In plain torch that is about what autograd would keep. With fused kernels it is in the output of the
    recurrence: the first product's output and its convolution, two forms of queries and keys, values,
    weights, updates, written values and outputs, the gate unless it is in the first product's output, the
    states, and the inverses of the systems.
    """
    if not is_fused:
        return mixer_bytes(mixer, element) + mixer.output_width * element
    heads, keys, values = mixer.heads, mixer.key_dim, mixer.value_dim
    around = mixer.projected_width + mixer.convolved_width + 4 * mixer.blocks * keys
    inside = keys + (4 + (mixer.heads_per_block > 1)) * values + keys * values // SCAN_CHUNK + SCAN_CHUNK
    return (around + heads * inside) * element + 4 * 5 * heads


def mixer_gradient_bytes(mixer: MixerShape, element: int, is_fused: bool = False) -> int:
    """Return the bytes of a token's gradients while backward is in the recurrence.

    In plain torch they are fp32, of queries, keys and values in two forms each, and of two matrices of pairs.
    It is an estimate. With fused kernels they are those of the step that mkd has on Hopper GPUs
    (chunk_gradients.py), which holds more than fla's: states and their gradients, three forms of queries and
    keys and nine of values, two gradients and two matrices of pairs in fp32, and three of e bytes.
    """
    heads, keys, values = mixer.heads, mixer.key_dim, mixer.value_dim
    if is_fused:
        inside = 3 * keys + 9 * values + 2 * keys * values // SCAN_CHUNK + 3 * SCAN_CHUNK
        return heads * (inside * element + 4 * (2 * keys + 2 * SCAN_CHUNK))
    return 4 * heads * (4 * keys + 2 * values + 2 * SCAN_CHUNK)
