"""Distillation losses on vocabulary shards, and `DistillationLoss` for other trainers.

kd_objective.py          settings of a loss, its columns on a rank, and its result
divergence_base.py       the interface of a divergence
divergences.py           one class for each divergence between teacher and student
dense_reference.py       the whole loss in one process, float64, by autograd: the definition for tests
softmax.py               softmax over a split vocabulary: the local part and the merge
statistics.py            row statistics after one pass over the logits, merged over ranks
torch_rows.py            the passes over logits in plain torch
vocab_parallel.py        the loss of logits that exist in full, and the choice of passes
lm_head.py               an LM head in a fused loss: logits of some rows, gradients summed block by block
fused_linear.py          LM heads and loss in one, block by block, for training
fused_rows.py            the same with a value for each row
differentiable_once.py   gradients that refuse a second derivative
softcap.py               logits that stay within a bound
scores.py                log-probability and entropy of given tokens, for evaluation
triton/                  the passes as GPU kernels
stored/                  the loss of a teacher whose top-k log-probabilities are stored
standalone/              the loss as a module, without Megatron unless the vocabulary is split
"""

from mkd.losses.divergences import build_divergence
from mkd.losses.fused_linear import fused_linear_kd
from mkd.losses.kd_objective import KDObjective, KDOutput
from mkd.losses.lm_head import HeadInput
from mkd.losses.standalone.distillation_loss import DistillationLoss, DistillationOutput
from mkd.losses.standalone.language_head import LMHead
from mkd.losses.stored.topk import vocab_parallel_topk_kd
from mkd.losses.vocab_parallel import vocab_parallel_kd

__all__ = [
    "DistillationLoss",
    "DistillationOutput",
    "HeadInput",
    "KDObjective",
    "KDOutput",
    "LMHead",
    "build_divergence",
    "fused_linear_kd",
    "vocab_parallel_kd",
    "vocab_parallel_topk_kd",
]
