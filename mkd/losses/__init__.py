"""Distillation losses on vocabulary shards, and the dense reference that defines them."""

from mkd.losses.fused_linear import fused_linear_kd
from mkd.losses.kd_objective import KDOutput
from mkd.losses.stored.topk import vocab_parallel_topk_kd
from mkd.losses.vocab_parallel import vocab_parallel_kd

__all__ = ["KDOutput", "fused_linear_kd", "vocab_parallel_kd", "vocab_parallel_topk_kd"]
