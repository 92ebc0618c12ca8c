"""`LMHead`: what a model's logits are made of, beside its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mkd.errors import UsageError

# Start of a model_type in transformers -> the key of its configuration that scales the logits, and how.
SCALES: dict[str, tuple[str, Callable[[float], float]]] = {
    "cohere": ("logit_scale", lambda value: value),
    "falcon_h1": ("lm_head_multiplier", lambda value: value),
    "granite": ("logits_scaling", lambda value: 1.0 / value),
    "hyperclovax": ("logits_scaling", lambda value: value),
}


@dataclass(frozen=True)
class LMHead:
    """Logits are z = scale * (hidden @ weight.T + bias), or logits_cap * tanh(z / logits_cap).

    Build it anew for each call: FSDP2 and optimisers replace parameters.
    """

    weight: Tensor  # [v, h] a tensor, or a DTensor; under a plain `tp_group` this rank's rows [v/tp, h]
    bias: Tensor | None = None  # [v]
    scale: float = 1.0
    logits_cap: float | None = None  # None: the logits are not bounded

    @classmethod
    def of(cls, head: LMHead | nn.Module | Tensor) -> LMHead:
        """Return the head of a weight, or of an `nn.Linear`.

        Raises UsageError for another module: its `weight` may not be all of it (adapters, quantisation).
        """
        if isinstance(head, LMHead):
            return head
        if isinstance(head, Tensor):
            return cls(head)
        if isinstance(head, nn.Linear) and head.weight.is_floating_point():
            return cls(head.weight, head.bias)
        raise UsageError(
            f"an LM head is a {type(head).__name__}",
            "the loss reads the weight of an nn.Linear in floating point; another module may do more",
            "give LMHead(weight, bias), or give logits instead of hidden states and heads",
            code="model-feature-not-supported",
        )

    @classmethod
    def from_transformers(cls, model: nn.Module) -> LMHead:
        """Return the head of a causal language model of transformers, with its scale and soft-cap.

        Knows the scales of Cohere, Falcon-H1, Granite and HyperCLOVA X, and the soft-cap of Gemma and others
        (`final_logit_softcapping`). `require_logits` checks any model.
        """
        config = model.config.get_text_config()
        kind, cap = str(config.model_type), getattr(config, "final_logit_softcapping", None)
        scale = 1.0
        for start, (key, read) in SCALES.items():
            if kind.startswith(start) and getattr(config, key, None) is not None:
                scale = read(float(getattr(config, key)))
        head = cls.of(model.get_output_embeddings())
        return cls(head.weight, head.bias, scale, float(cap) if cap else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., v] by plain torch, for checks."""
        logits = nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.logits_cap is None else self.logits_cap * torch.tanh(logits / self.logits_cap)

    @torch.no_grad()
    def require_logits(self, model: nn.Module, **inputs: Any) -> None:
        """Raise UsageError unless the model's logits are those of this head on its last hidden states.

        `inputs` are those of the model, such as `input_ids` of a few tokens.
        """
        output = model(**inputs, output_hidden_states=True)
        expected, found = output.logits.float(), self.logits(output.hidden_states[-1]).float()
        eps = torch.finfo(output.logits.dtype).eps
        error = float((expected - found).abs().max() / expected.abs().max().clamp(min=1.0))
        if not error <= 8 * eps:
            raise UsageError(
                f"logits of {type(model).__name__} differ from those of its LM head by {error:.1e}",
                "the model changes hidden states or logits in a way that LMHead does not know",
                "give LMHead the right scale, soft-cap and bias, or give logits instead of hidden states",
                code="model-feature-not-supported",
            )
