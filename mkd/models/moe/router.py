"""Megatron's router with mkd's balance losses."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn import functional as F

from mkd.models.moe.balance import RouterRecord, WithLoss

HAS_KERNEL = getattr(moe_utils, "te_general_gemm", None) is not None


class DocumentRouter(TopKRouter):
    """Chooses the experts of every token; in training, adds balance losses and records the load.

    A frozen model has no record: it writes nothing.
    """

    record: RouterRecord | None = None

    def gating(self, input: Tensor) -> Tensor:  # [t, 1, h] -> fp32 [t, 1, E]
        """Return the logits. Without Transformer Engine, Megatron 0.16 fails here.

        The bias is added in fp32: the kernel takes a bias of the logits' dtype only.
        """
        if HAS_KERNEL:
            logits = moe_utils.router_gating_linear(input, self.weight, None, torch.float32)
        else:
            logits = F.linear(input.float(), self.weight.float())
        return logits if self.bias is None else logits + self.bias.float()

    def _apply_expert_bias(self, *unused: Any, **others: Any) -> None:
        """Count nothing, unlike Megatron: `record` has the real tokens, and ExpertMonitor moves the bias."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights [t, E] and choice, bool [t, E], of each token's experts.

        `padding_mask` holds the documents of `token_documents`. A layer that is recomputed is recorded once:
        its first forward has no gradients.
        """
        weights, selected = super().routing(logits, None)
        if padding_mask is None or self.record is None or not torch.is_grad_enabled():
            return weights, selected
        flat = logits.view(-1, logits.size(-1))
        loss = self.record.add(self.layer_number, flat, selected, padding_mask, self.tp_cp_group)
        return weights if loss is None else WithLoss.apply(weights, loss), selected


class ScaledRouter(DocumentRouter):
    """A router of normalised inputs, times a learned scale / sqrt(h). It scales the weights of each expert.

    Source: transformers, `Gemma4TextRouter`.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.input_scale = self._scale(config.hidden_size)
        self.expert_scale = self._scale(config.num_moe_experts)

    def _scale(self, size: int) -> nn.Parameter:
        scale = nn.Parameter(torch.ones(size, dtype=self.config.params_dtype))
        scale.sequence_parallel = self.config.sequence_parallel
        return scale

    def gating(self, input: Tensor) -> Tensor:  # [t, 1, h] -> fp32 [t, 1, E]
        """Return the logits."""
        unit = F.rms_norm(input, input.shape[-1:], eps=self.config.layernorm_epsilon)
        return super().gating(unit * self.input_scale * input.size(-1) ** -0.5)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights [t, E] and choice, bool [t, E], of each token's experts."""
        weights, selected = super().routing(logits, padding_mask)
        return weights * self.expert_scale.to(weights.dtype), selected
