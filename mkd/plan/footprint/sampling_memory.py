"""The memory of sampling: keys and values of earlier tokens, and the logits of a new one."""

from __future__ import annotations

from collections.abc import Sequence

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.model_shape import ModelShape

LOGIT_BYTES = 16  # of a logit while a token is sampled: fp32, its exponential, products


def cache_bytes(
    config: Config, slots: int, shape: ModelShape, layers: Sequence[LayerShape], element: int
) -> int:
    """Return the bytes of the keys and values of `layers` on one process, all `slots` full.

    `element` is the size of a number, bytes.
    """
    tensor = config.parallel.tensor_model_parallel_size
    groups = shape.padded_query_groups(tensor) // tensor
    of_token = 2 * len(layers) * groups * shape.head_dim * element
    return slots * config.training.seq_length * of_token


def sampling_bytes(slots: int, vocab_rows: int) -> int:
    """Return the bytes of the logits of one new token in every slot; `vocab_rows` of one process."""
    return slots * vocab_rows * LOGIT_BYTES
