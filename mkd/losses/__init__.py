"""Distillation losses on vocabulary shards, and the dense reference that defines them."""

from mkd.losses.objective import KDOutput
from mkd.losses.vocab_parallel import vocab_parallel_kd

__all__ = ["KDOutput", "vocab_parallel_kd"]
