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

Mamba-2 keeps six forms of n dk, seven of n dv with the gated norm, three matrices, and eight numbers; in fp32
also the activated sum of the convolution, c e.

Measured with `saved_tensors_hooks` on torch 2.13: see tests/plan/footprint/test_mixer_bytes.py. A fused
kernel keeps far less.
"""

from __future__ import annotations

from mkd.families.mixer_shape import MixerShape
from mkd.plan.models.flops import SCAN_CHUNK


def mixer_bytes(mixer: MixerShape, element: int) -> int:
    """Return the bytes that one token keeps between the projections; `element` is that of an activation."""
    heads, keys, values = mixer.heads, mixer.key_dim, mixer.value_dim
    convolution = (mixer.kernel_size + 1) * mixer.convolved_width * element
    state = keys * values // SCAN_CHUNK
    if mixer.has_corrections:
        before = 4 * 2 * mixer.blocks * keys
        recurrence = 4 * heads * (10 * keys + 3 * values + 5 * SCAN_CHUNK + state)
        recurrence += heads * values * (3 * 4 + 2 * element)
        numbers = 10
    else:
        before = mixer.convolved_width * element if element == 4 else 0
        recurrence = 4 * heads * (6 * keys + 7 * values + 3 * SCAN_CHUNK + state)
        numbers = 8
    return convolution + before + recurrence + 4 * numbers * heads + SCAN_CHUNK


def mixer_gradient_bytes(mixer: MixerShape) -> int:
    """Return the bytes of a token's gradients while backward is in the recurrence.

    They are fp32, of queries, keys and values in two forms each, and of two matrices of pairs. It is an
    estimate.
    """
    return 4 * mixer.heads * (4 * mixer.key_dim + 2 * mixer.value_dim + 2 * SCAN_CHUNK)
