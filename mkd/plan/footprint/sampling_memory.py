"""The memory of sampling: what layers keep of earlier tokens, and the logits of a new one."""

from __future__ import annotations

from collections.abc import Sequence

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape
from mkd.families.mixer_shape import MixerShape
from mkd.plan.models.model_shape import ModelShape

LOGIT_BYTES = 16  # of a logit while a token is sampled: fp32, its exponential, products


def cache_bytes(
    config: Config, slots: int, shape: ModelShape, layers: Sequence[LayerShape], element: int
) -> int:
    """Return the bytes that `layers` keep on one process, all `slots` full.

    Attention keeps keys and values of every token, a mixer what `mixer_state_bytes` counts of a
    sequence. `element` is the size of a number, bytes.
    """
    tensor = config.parallel.tensor_model_parallel_size
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    with_heads = [shape.for_layer(layer) for layer in layers if layer.has_attention]
    channels = sum(one.padded_query_groups(tensor) // tensor * one.head_dim for one in with_heads)
    of_token = 2 * channels * element
    states = sum(mixer_state_bytes(mixer, element) for mixer in mixers) // tensor
    return slots * (config.training.seq_length * of_token + states)


def mixer_state_bytes(mixer: MixerShape, element: int) -> int:
    """Return the bytes of a sequence's state, in fp32, and of the inputs that its convolution sees again."""
    state = mixer.heads * mixer.key_dim * mixer.value_dim * 4
    return state + mixer.convolved_width * (mixer.kernel_size - 1) * element


def sampling_bytes(slots: int, vocab_rows: int) -> int:
    """Return the bytes of the logits of one new token in every slot; `vocab_rows` of one process."""
    return slots * vocab_rows * LOGIT_BYTES
