"""Balance losses by document, and the load of the experts.

Megatron's own losses depend on how documents are packed and on the layout. These do not: for a document d of
n_d real tokens, N real tokens in the global batch, E experts, k of them a token, scores s (without a
correction bias) and selections c, which have no gradient,

    balance = alpha E / (k N) * sum_d 1/n_d sum_i c_di sum_{t in d} s_ti
    z = zeta / N * sum_t lse(logits_t)^2

for every layer with experts. Even routing gives a balance loss of alpha. Sources: Switch Transformer (Fedus
et al. 2021, section 2.2) for a document instead of a batch; ST-MoE (Zoph et al. 2022, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.families.layer_shape import MoEShape
from mkd.models.moe.token_documents import split_documents

BALANCE, Z = "moe_balance", "moe_z"
"""Names of the losses in metrics."""


@dataclass(eq=False)
class RouterRecord:
    """Sums of one model part's routers over a step: tokens of every expert, and both losses."""

    moe: MoEShape
    balance_coeff: float  # alpha
    z_coeff: float  # zeta
    sums: Tensor  # [layers of the model, E + 2] fp64: tokens of each expert, balance loss, z loss
    inverse_tokens: Tensor = field(init=False)  # 1 / N, fp32 []; CUDA graphs read it, so it never moves

    def __post_init__(self) -> None:
        self.inverse_tokens = torch.ones((), device=self.sums.device)

    def start_step(self, inverse_tokens: Tensor) -> None:
        """Forget the last step. `inverse_tokens` is 1 / the real tokens of the global batch, fp32 []."""
        self.sums.zero_()
        self.inverse_tokens.copy_(inverse_tokens)

    def add(
        self,
        layer_number: int,  # from 1, in the whole model
        logits: Tensor,  # [t, E] fp32, the tokens of this process
        selected: Tensor,  # [t, E] bool
        documents: Tensor,  # see `token_documents`
        group: dist.ProcessGroup,  # the processes that hold the tokens of one pack
    ) -> Tensor | None:
        """Add one micro-batch, and return its losses, fp32 [], with their graph; None without losses.

        All-reduce SUM of the counts over `group` for the balance loss; no backward.
        """
        ids, lengths = split_documents(documents, logits.size(0))
        real = (ids >= 0)[:, None]
        chosen = (selected & real).float()
        row = self.sums[layer_number - 1]
        row[: self.moe.num_experts] += chosen.sum(0)
        losses = []
        if self.balance_coeff:
            counts = logits.new_zeros(lengths.numel(), self.moe.num_experts)
            counts.index_add_(0, ids.clamp(min=0), chosen)
            if group.size() > 1:
                dist.all_reduce(counts, group=group)
            shares = (counts / lengths.clamp(min=1)[:, None])[ids.clamp(min=0)]
            factor = self.balance_coeff * self.moe.num_experts / self.moe.top_k
            losses.append((self._scores(logits) * shares * real).sum() * (factor * self.inverse_tokens))
            row[-2] += losses[-1].detach()
        if self.z_coeff:
            squares = logits.logsumexp(-1).square() * real[:, 0]
            losses.append(squares.sum() * (self.z_coeff * self.inverse_tokens))
            row[-1] += losses[-1].detach()
        return sum(losses) if losses else None

    def _scores(self, logits: Tensor) -> Tensor:
        if self.moe.scores == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)


class WithLoss(torch.autograd.Function):
    """Carries a loss along with a tensor: in backward the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.set_materialize_grads(True)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)
