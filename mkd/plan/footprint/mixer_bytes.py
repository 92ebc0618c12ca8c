"""The memory of a gated delta net in torch (mkd/models/mixers), in bytes a token of all heads.

With n value heads of dv channels, K key heads of dk, c channels of a convolution over k tokens and chunks of
C tokens, autograd keeps, e being the bytes of an activation,

    convolution    each of its k inputs and its sum: (k + 1) c e
    q and k        before they have length 1: 4 (2 K dk)
    recurrence     fp32: nine forms of queries and keys n dk; values, updates and outputs n dv; the solution
                   n (dk + dv); five matrices n C of pairs; a state n dk dv for each chunk
    gated norm     three forms of n dv in fp32, two of e bytes
    numbers        ten fp32 of a value head: decays, strengths and statistics; C bytes of masks

Measured with `saved_tensors_hooks` on torch 2.13: see tests/plan/footprint/test_mixer_bytes.py. A fused
kernel keeps far less.
"""

from __future__ import annotations

from mkd.families.layer_shape import DeltaShape
from mkd.plan.models.flops import SCAN_CHUNK


def mixer_bytes(mixer: DeltaShape, element: int) -> int:
    """Return the bytes that one token keeps between the projections; `element` is that of an activation."""
    heads, keys, values = mixer.value_heads, mixer.key_dim, mixer.value_dim
    convolution = (mixer.kernel_size + 1) * mixer.convolved_width * element
    before = 4 * 2 * mixer.key_heads * keys
    recurrence = 4 * heads * (10 * keys + 3 * values + 5 * SCAN_CHUNK + keys * values // SCAN_CHUNK)
    norm = heads * values * (3 * 4 + 2 * element)
    return convolution + before + recurrence + norm + 4 * 10 * heads + SCAN_CHUNK


def mixer_gradient_bytes(mixer: DeltaShape) -> int:
    """Return the bytes of a token's gradients while backward is in the recurrence.

    They are fp32, of queries, keys and values in two forms each, and of two matrices of pairs. It is an
    estimate.
    """
    heads = mixer.value_heads
    return 4 * heads * (4 * mixer.key_dim + 2 * mixer.value_dim + 2 * SCAN_CHUNK)
