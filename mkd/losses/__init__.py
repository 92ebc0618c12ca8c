"""Distillation losses on vocabulary shards.

kd_objective.py          settings of a loss, its columns on a rank, and its result
divergences.py           one class for each divergence between teacher and student
dense_reference.py       the whole loss in one process, float64, by autograd: the definition for tests
softmax.py               softmax over a split vocabulary: the local part and the merge
statistics.py            row statistics after one pass over the logits, merged over ranks
torch_rows.py            the passes over logits in plain torch
vocab_parallel.py        the loss of logits that exist in full, and the choice of passes
fused_linear.py          LM heads and loss in one, block by block, for training
softcap.py               logits that stay within a bound
scores.py                log-probability and entropy of given tokens, for evaluation
triton_divergences.py    the formulas of the divergences for GPU kernels
triton_kernels.py        the passes as GPU kernels
triton_merge.py          the merge of row statistics as a GPU kernel
triton_rows.py           launches these kernels, with the functions of torch_rows.py
stored/                  the loss of a teacher whose top-k log-probabilities are stored
"""

from mkd.losses.divergences import build_divergence
from mkd.losses.fused_linear import HeadInput, fused_linear_kd
from mkd.losses.kd_objective import KDObjective, KDOutput
from mkd.losses.stored.topk import vocab_parallel_topk_kd
from mkd.losses.vocab_parallel import vocab_parallel_kd

__all__ = [
    "HeadInput",
    "KDObjective",
    "KDOutput",
    "build_divergence",
    "fused_linear_kd",
    "vocab_parallel_kd",
    "vocab_parallel_topk_kd",
]
